"""The path of a request: what is refused and where, and what reaches the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from fastserve.generation import Finish, FinishReason, Refusal, RefusalReason, SamplingParams
from fastserve.lane.messages import Submit, SubmitGroup
from fastserve.metrics.catalog import ABORTS, ADMISSION_REJECTIONS, ENDPOINTS, PROMPT_TOKENS
from tests.frontend.stage import LENGTH, MAX_SEQ_LEN, STOP, USER, Stage

if TYPE_CHECKING:
    from fastserve.generation import ModelCard


# ---- the head


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_a_route_that_is_none_is_refused(
    stage: Stage, method: str, path: str, status: int, code: str
) -> None:
    asked = stage.request(method, path)
    error = asked.json()["error"]
    assert (asked.status, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert (asked.header("allow") is not None) == (status == 405)


def test_options_tells_the_methods(stage: Stage) -> None:
    asked = stage.request("OPTIONS", "/v1/completions")
    assert (asked.status, asked.header("allow")) == (204, "OPTIONS, POST")


@pytest.mark.parametrize("header", ["Content-Type: text/plain", "Content-Encoding: gzip"])
def test_a_body_of_another_kind_is_refused(stage: Stage, header: str) -> None:
    asked = stage.request("POST", "/v1/completions", body=b"{}", headers=[header])
    assert (asked.status, asked.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    "headers",
    [[], ["Content-Type: application/json; charset=utf-8"], ["Content-Encoding: identity"]],
)
def test_a_body_of_json_is_taken(stage: Stage, headers: list[str]) -> None:
    stage.request("POST", "/v1/completions", body=b'{"prompt":"a"}', headers=headers)
    assert len(stage.submits) == 1


# ---- the body


@pytest.mark.parametrize("off_loop_bytes_min", [0, 1 << 20], ids=["in a thread", "at once"])
@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"not json", 400, None),
        (b"[]", 400, None),
        (b'{"prompt":""}', 400, "prompt"),
        (b'{"prompt":"a","model":"other"}', 404, "model"),
        (b'{"prompt":"a","max_tokens":64}', 400, "prompt"),
    ],
)
def test_a_bad_request_leaves_nothing_behind(
    card: ModelCard, off_loop_bytes_min: int, body: bytes, status: int, param: str | None
) -> None:
    stage = Stage(card, off_loop_bytes_min=off_loop_bytes_min)
    asked = stage.ask(raw=body)
    if not off_loop_bytes_min:
        stage.run_call()
    assert (asked.status, asked.json()["error"]["param"]) == (status, param)
    assert stage.inbox == []
    assert stage.frontend.num_in_flight == 0


def test_too_long_a_prompt_is_refused_with_its_code(stage: Stage) -> None:
    for stream in (True, False):
        asked = stage.ask(prompt="a" * MAX_SEQ_LEN, stream=stream)
        assert (asked.status, asked.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_long_body_is_prepared_in_a_thread(card: ModelCard) -> None:
    stage = Stage(card, off_loop_bytes_min=100)
    asked = stage.ask(prompt="a", sim={"padding": "x" * 100})
    assert stage.inbox == []
    stage.run_call()
    assert len(stage.submits) == 1
    stage.say(b"b", STOP)
    assert asked.json()["choices"][0]["text"] == "b"


def test_who_leaves_while_a_thread_works_asks_for_nothing(card: ModelCard) -> None:
    stage = Stage(card, off_loop_bytes_min=0)
    stage.ask(prompt="a").exchange.disconnect()
    stage.run_call()
    assert stage.inbox == []
    assert stage.frontend.num_in_flight == 0


def test_an_engine_that_dies_while_a_thread_works_is_told_of(card: ModelCard) -> None:
    stage = Stage(card, off_loop_bytes_min=0)
    asked = stage.ask(prompt="a")
    stage.frontend.on_engine_gone("lightning")
    stage.run_call()
    assert (asked.status, asked.json()["error"]["code"]) == (503, "engine_dead")


def test_a_bug_in_a_thread_is_a_bare_500(card: ModelCard, monkeypatch: Any) -> None:
    stage = Stage(card, off_loop_bytes_min=0)
    monkeypatch.setattr(stage.state.model, "completion_prompt", None)
    asked = stage.ask(prompt="a")
    stage.run_call()
    assert asked.status == 500
    assert "NoneType" not in asked.sent.decode()


# ---- what reaches the engine


def test_a_request_is_submitted_as_it_was_asked(stage: Stage) -> None:
    stage.ask(
        prompt="ab", max_tokens=3, temperature=0.5, top_p=0.9, top_k=4, seed=6, logprobs=2,
        stop_token_ids=[7], ignore_eos=True, logit_bias={"9": -1}, sim={"fail_at": 1},
    )  # fmt: skip
    [submit] = stage.submits
    assert submit == Submit(
        request_id=submit.request_id,
        prompt_token_ids=[97, 98],
        sampling=SamplingParams(
            max_tokens=3, temperature=0.5, top_p=0.9, top_k=4, seed=6, logprobs=2,
            stop_token_ids=(7,), ignore_eos=True, logit_bias={9: -1.0},
        ),
        gather=True,
        sim={"fail_at": 1},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "gather"),
    [({}, True), ({"stream": True}, False), ({"stop": "x"}, False)],
    ids=["nobody reads them", "they are streamed", "they may complete a stop"],
)
def test_tokens_that_nobody_reads_come_at_once(
    stage: Stage, fields: dict[str, Any], *, gather: bool
) -> None:
    stage.ask(**fields)
    assert stage.submits[0].gather is gather


@pytest.mark.parametrize("stream", [True, False])
def test_choices_are_submitted_prompt_by_prompt(stage: Stage, *, stream: bool) -> None:
    asked = stage.ask(prompt=["a", "b"], n=2, stream=stream)
    assert [submit.prompt_token_ids for submit in stage.submits] == [[97], [97], [98], [98]]
    assert len({submit.request_id for submit in stage.submits}) == 4
    for number in (3, 1, 0, 2):
        stage.say(b"%d" % number, LENGTH, request=number)
    for number in range(4):
        text = asked.said(number) if stream else asked.json()["choices"][number]["text"]
        assert text == str(number)


def test_a_chat_is_submitted_with_its_template(stage: Stage) -> None:
    asked = stage.chat(model="bytes")
    assert bytes(stage.submits[0].prompt_token_ids[1:]) == b"hi"
    stage.say(b"yo", STOP)
    answer = asked.json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == "yo"
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_client_may_name_its_request(stage: Stage) -> None:
    asked = stage.request(
        "POST", "/v1/completions", body=b'{"prompt":"a"}', headers=["X-Request-Id: mine"]
    )
    stage.say(b"b", STOP)
    assert asked.header("x-request-id") == "mine"
    assert asked.json()["id"] == "cmpl-mine"


# ---- admission


def test_requests_over_the_limit_are_overloaded(card: ModelCard) -> None:
    stage = Stage(card, requests_in_flight_max=3)
    stage.ask(stream=True, n=2)
    too_many = stage.ask(n=2)
    assert (too_many.status, too_many.json()["error"]["code"]) == (429, "overloaded")
    assert too_many.header("retry-after") == "1"
    taken = stage.ask()
    assert not taken.ended
    # Now it shows before the body is read.
    refused = stage.ask(raw=b"whatever")
    assert refused.json()["error"]["code"] == "overloaded"
    assert stage.request("GET", "/health").status == 200
    stage.say(b"a", STOP, request=0)
    assert not stage.ask().ended
    assert stage.count(ADMISSION_REJECTIONS, "requests_in_flight") == 2


def test_a_full_lane_is_overloaded(stage: Stage) -> None:
    stage.full = True
    asked = stage.ask(n=2, stream=True)
    assert (asked.status, asked.json()["error"]["code"]) == (429, "overloaded")
    assert stage.frontend.num_in_flight == 0
    stage.full = False
    assert not stage.ask().ended
    assert stage.count(ADMISSION_REJECTIONS, "lane_full") == 1
    assert stage.aborted == []


REFUSED = Finish(
    reason=FinishReason.ERROR,
    error="10 of at most 10 requests are queued",
    refusal=Refusal(reason=RefusalReason.QUEUED_REQUESTS, retry_after_s=7),
)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_what_the_engine_refuses_has_never_begun(stage: Stage, *, stream: bool) -> None:
    asked = stage.ask(n=2, stream=stream)
    [group] = stage.inbox
    assert isinstance(group, SubmitGroup), "one message, of which all is taken or nothing"
    stage.say(b"", REFUSED, request=0)
    stage.say(b"", REFUSED, request=1)
    error = asked.json()["error"]
    assert (asked.status, asked.header("retry-after")) == (429, "7")
    assert (error["type"], error["code"], error["message"]) == (
        "overloaded", "overloaded", REFUSED.error,
    )  # fmt: skip
    assert stage.aborted == []
    assert sum(stage.count(ABORTS, *series) for series in ABORTS.series) == 0
    assert stage.count(ADMISSION_REJECTIONS, "queued_requests") == 1
    assert stage.count(PROMPT_TOKENS) == 0, "nobody will read it"
    assert stage.frontend.num_in_flight == 0


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_prompt_counts_once_whatever_comes_of_it(stage: Stage, *, stream: bool) -> None:
    answered, left = stage.ask(n=2, stream=stream), stage.ask(stream=stream)
    per_request = len(stage.submits[-1].prompt_token_ids)
    for request in range(2):
        stage.say(b"a", STOP, request=request)
    assert answered.ended
    assert stage.count(PROMPT_TOKENS) == per_request
    left.exchange.disconnect()
    assert stage.count(PROMPT_TOKENS) == 2 * per_request


def test_a_refusal_is_told_in_the_words_of_its_dialect(stage: Stage) -> None:
    messages = [{"role": "user", "content": "hi"}]
    asked = stage.ask("/v1/messages", messages=messages, max_tokens=9)
    stage.say(b"", REFUSED)
    assert (asked.status, asked.json()["error"]["type"]) == (429, "rate_limit_error")


# ---- what the server says of itself


@pytest.mark.parametrize(
    ("state", "health", "ready"),
    [
        ("ready", 200, 200),
        ("draining", 200, 503),
        ("starting", 503, 503),
        ("stalled", 503, 503),
        ("dead", 503, 503),
    ],
)
def test_health_and_ready(stage: Stage, state: str, health: int, ready: int) -> None:
    if state == "draining":
        stage.state.draining = True
    elif state == "starting":
        stage.beat(ready=False)
    elif state == "stalled":
        stage.beat(ready=True, now_s=-2e9)
        stage.liveness._progress_s = -2e9
    elif state == "dead":
        stage.frontend.on_engine_gone("lightning")
    for path, status in (("/health", health), ("/ready", ready)):
        asked = stage.request("GET", path)
        assert asked.status == status
        assert asked.json() == {"status": state, "num_running": 2, "num_waiting": 1}


def test_before_the_model_is_there_nothing_is_taken(stage: Stage) -> None:
    stage.state.model = None
    for asked in (stage.ask(), stage.chat(), stage.request("GET", "/v1/models")):
        assert (asked.status, asked.json()["error"]["code"]) == (503, "engine_starting")
        assert asked.header("retry-after") == "1"


def test_once_the_engine_is_dead_nothing_is_taken_and_nobody_told(stage: Stage) -> None:
    waiting = stage.ask()
    stage.frontend.on_engine_gone("lightning")
    for asked in (waiting, stage.ask(), stage.chat(stream=True)):
        assert (asked.status, asked.json()["error"]["type"]) == (503, "engine_dead")
        assert asked.json()["error"]["message"] == "lightning"
        assert asked.header("retry-after") == "5"
    assert stage.aborted == []


def test_the_model_and_the_version_are_told(stage: Stage) -> None:
    [model] = stage.request("GET", "/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("bytes", MAX_SEQ_LEN)
    assert set(stage.request("GET", "/version").json()) == {"version"}


def test_head_is_get_without_a_body(stage: Stage) -> None:
    for path in ("/health", "/v1/models", "/version"):
        asked = stage.request("HEAD", path)
        assert asked.status == 200
        assert asked.sent.endswith(b"\r\n\r\n")


# ---- another dialect


MESSAGES_PATHS = pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])


@MESSAGES_PATHS
@pytest.mark.parametrize(
    ("state", "status", "kind"),
    [
        ("a bad body", 400, "invalid_request_error"),
        ("another type", 415, "invalid_request_error"),
        ("another method", 405, "invalid_request_error"),
        ("another model", 404, "not_found_error"),
        ("no route", 404, "not_found_error"),
        ("starting", 503, "overloaded_error"),
    ],
)
def test_a_refusal_is_in_the_words_of_the_route(
    stage: Stage, path: str, state: str, status: int, kind: str
) -> None:
    fields: Any = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 1,
        "model": "other",
    }
    if state == "starting":
        stage.state.model = None
    if state == "another method":
        asked = stage.request("GET", path)
    elif state == "no route":
        asked = stage.ask(f"{path}/batches", **fields)
    elif state == "another type":
        asked = stage.request("POST", path, headers=["Content-Type: text/plain"])
    elif state == "a bad body":
        asked = stage.ask(path, raw=b"[")
    else:
        asked = stage.ask(path, **fields)
    assert asked.status == status
    assert (asked.json()["type"], asked.json()["error"]["type"]) == ("error", kind)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (408, "timeout_error"),
        (413, "request_too_large"),
        (431, "invalid_request_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_a_refusal_of_http_is_in_the_words_of_its_path(
    stage: Stage, status: int, kind: str
) -> None:
    told = orjson.loads(stage.frontend.error_body(status, "no", path="/v1/messages"))
    assert told == {"type": "error", "error": {"type": kind, "message": "no"}}
    for path in ("/v1/messages2", "/v1/chat/completions", None):
        told = orjson.loads(stage.frontend.error_body(status, "no", path=path))
        assert told["error"]["message"] == "no"
        assert "type" not in told


def test_who_asks_for_a_message_learns_its_id(stage: Stage) -> None:
    asked = stage.ask("/v1/messages", messages=[], max_tokens=1)
    assert asked.status == 400
    assert asked.header("request-id") == asked.header("x-request-id") == asked.exchange.request_id
    assert stage.ask("/v1/completions", prompt="").header("request-id") is None


# ---- names of the model, and fields that nobody knows


def test_a_model_answers_to_each_of_its_names(card: ModelCard) -> None:
    stage = Stage(card, names=(card.name, "also"))
    for name in (None, card.name, "also"):
        asked = stage.ask(model=name)
        stage.say(b"x", LENGTH)
        assert asked.json()["model"] == card.name
    assert stage.ask(model="other").status == 404
    listed = stage.request("GET", "/v1/models").json()["data"]
    assert [model["id"] for model in listed] == [card.name, "also"]
    for model in listed:
        assert stage.request("GET", f"/v1/models/{model['id']}").json() == model
    assert stage.request("GET", "/v1/models/other").status == 404


FIELDS_OF_ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/responses", {"input": "a", "store": False}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/responses/input_tokens", {"input": "a"}),
    ("/tokenize", {"prompt": "a"}),
    ("/detokenize", {"tokens": [1]}),
]


@pytest.mark.parametrize(("path", "fields"), FIELDS_OF_ROUTES)
def test_a_field_that_nobody_knows_is_counted_and_may_be_refused(
    card: ModelCard, path: str, fields: dict[str, Any]
) -> None:
    lenient, strict = Stage(card), Stage(card, refuse_unknown_fields=True)
    refused = strict.ask(path, **fields, frobnicate=1, wibble="x")
    assert refused.status == 400
    assert "Nobody knows 'frobnicate', 'wibble' here." in refused.json()["error"]["message"]
    assert strict.inbox == []
    lenient.ask(path, **fields, frobnicate=1, wibble="x")
    strict.ask(path, **fields)
    for stage in (lenient, strict):
        assert b"fastserve_request_unknown_fields_total 2.0" in metrics_of(stage)
    generates = path.startswith("/v1") and not path.endswith("_tokens")
    assert len(lenient.submits) == len(strict.submits) == generates


def metrics_of(stage: Stage) -> bytes:
    asked = stage.request("GET", "/metrics")
    stage.run_call()
    return asked.sent


def test_a_message_is_a_chat_with_the_room_there_is(stage: Stage) -> None:
    messages = [{"role": "user", "content": "hi"}]
    asked = stage.ask("/v1/messages", system="S", messages=messages, max_tokens=10_000)
    [submit] = stage.submits
    assert submit.prompt_token_ids == [USER, *b"S", USER, *b"hi"]
    assert submit.sampling == SamplingParams(max_tokens=MAX_SEQ_LEN - 5)
    stage.say(b"yo", LENGTH)
    answer = asked.json()
    assert answer["content"] == [{"type": "text", "text": "yo"}]
    assert answer["stop_reason"] == "model_context_window_exceeded"
    counted = stage.ask("/v1/messages/count_tokens", system="S", messages=messages)
    assert counted.json() == {"input_tokens": 5}


def test_the_tokens_of_a_response_are_counted(stage: Stage) -> None:
    counted = stage.ask("/v1/responses/input_tokens", instructions="S", input="hi")
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": 5}
    unknown = stage.ask("/v1/responses/input_tokens", input="hi", previous_response_id="resp_x")
    assert unknown.json()["error"]["code"] == "previous_response_not_found"
    other = stage.ask("/v1/responses/input_tokens", input="hi", model="other")
    assert other.status == 404
    assert stage.inbox == []


def test_a_prompt_that_leaves_no_room_is_refused(stage: Stage) -> None:
    messages = [{"role": "user", "content": "a" * MAX_SEQ_LEN}]
    asked = stage.ask("/v1/messages", messages=messages, max_tokens=1)
    assert asked.status == 400
    assert "maximum context length" in asked.json()["error"]["message"]


# ---- the document


def test_the_document_has_every_route_and_no_other(stage: Stage) -> None:
    asked = stage.request("GET", "/openapi.json")
    stage.run_call()
    told = {
        (method.upper(), path) for path, item in asked.json()["paths"].items() for method in item
    }
    assert told == {
        (method, route.path) for route in stage.frontend.routes for method in route.handlers
    }


def test_every_route_is_counted_by_its_name(stage: Stage) -> None:
    by_choice = {"/"}
    told = {route.path for route in stage.frontend.routes}
    assert told == set(ENDPOINTS) - {"other"} - by_choice
