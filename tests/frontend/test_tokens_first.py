"""What happens between the requests of a burst."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve.frontend.tokens_first import TokensFirst
from fastserve.lane.messages import Outputs
from tests.frontend.stage import Asked

if TYPE_CHECKING:
    from tests.frontend.stage import Stage

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n"


def test_a_token_that_comes_in_a_burst_of_requests_does_not_wait_for_its_end(stage: Stage) -> None:
    streaming = stage.ask(stream=True)
    [submit] = stage.submits
    said = []

    def look() -> None:
        stage.frontend.on_outputs(Outputs(request_ids=[submit.request_id], token_ids=[97]))
        said.append(streaming.said())

    app = TokensFirst(stage.frontend, look=look)
    burst = [Asked(HEAD, b'{"prompt":"p","stream":true}') for _ in range(3)]
    for asked in burst:
        assert app.check(asked.exchange.head) is None
        app.serve(asked.exchange)
    assert said == ["a", "aa", "aaa"]
    assert len(stage.submits) == 4
    assert app.error_body(400, "no", path=None) == stage.frontend.error_body(400, "no", path=None)
