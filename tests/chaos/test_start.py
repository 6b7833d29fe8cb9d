"""A server that is told to stop before it has begun: at any moment, and it leaves nothing."""

from __future__ import annotations

import random
import signal
import time

from tests.e2e.harness import DEADLINE_S, Server

# From the making of the run directory until the supervisor waits: what is made there must go.
_MOMENT_S = 0.004
_STARTS = 12


def test_a_start_may_be_ended_at_any_moment() -> None:
    rng = random.Random(1)
    for _ in range(_STARTS):
        server = Server("--engine", "sim", "--frontends", "1")
        try:
            _wait_for_run_directory(server)
            time.sleep(rng.uniform(0, _MOMENT_S))
            server.process.send_signal(signal.SIGTERM)
            assert server.wait_exit() == 0
            server.assert_nothing_left()
            assert "Traceback" not in server.log
        finally:
            server.kill_everything()


def _wait_for_run_directory(server: Server) -> None:
    give_up_s = time.monotonic() + DEADLINE_S
    while not any(server.run_parent.iterdir()):  # without a pause, which would miss the moment
        assert time.monotonic() < give_up_s
