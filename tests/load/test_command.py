from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from fastserve.cli import main
from tests.load.answers import DONE, FINISH, Answering, needs_cc, stream, text

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs_cc

TWO = stream(text("a"), text("b"), FINISH, DONE)


def flags(port: int, *more: str) -> list[str]:
    return ["bench", "--url", f"http://127.0.0.1:{port}", "--model", "m", "-c", "2", *more]


def test_a_closed_loop_is_told_in_full(
    answering: tuple[Answering, int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    answering[0].answer = TWO
    short = ["--duration-s", "0.3", "--warm-s", "0", "--max-tokens", "2", "--exact"]
    assert main(flags(answering[1], *short, "--json", str(tmp_path / "figures"))) == 0
    out = capsys.readouterr().out
    assert "failures    none; unfinished 0" in out
    assert "ttft        p50" in out
    figures = json.loads((tmp_path / "figures").read_text())
    assert figures["requests"] > 0
    assert figures["latency_ms"]["p99"] >= figures["latency_ms"]["p50"] > 0
    asked = json.loads(answering[0].asked[0])
    assert (asked["model"], asked["max_tokens"], asked["stream"]) == ("m", 2, True)


def test_the_same_server_fails_who_expects_more(answering: tuple[Answering, int]) -> None:
    answering[0].answer = TWO
    short = ["--duration-s", "0.1", "--warm-s", "0", "--max-tokens", "3", "--exact"]
    assert main(flags(answering[1], *short)) == 1


def test_an_open_loop_sends_at_its_rate(
    answering: tuple[Answering, int], capsys: pytest.CaptureFixture[str]
) -> None:
    answering[0].answer = TWO
    assert main(flags(answering[1], "--rate", "100", "--duration-s", "1", "--warm-s", "0")) == 0
    assert 60 < len(answering[0].asked) < 150


@pytest.mark.parametrize("kind", ["Poisson", "trace"])
def test_what_a_server_that_stands_still_keeps_from_being_sent_counts_as_waited(
    kind: str, answering: tuple[Answering, int], tmp_path: Path
) -> None:
    # It stands still for 0.5 s at its first request, and one connection is all there is: those
    # that were due meanwhile are sent late, and answered at once. Counted from when they were sent,
    # all but the first would have taken no time.
    answering[0].answer, answering[0].stalls_s = TWO, [0.5]
    trace = tmp_path / "trace.jsonl"
    lines = [json.dumps({"at_s": at / 100, "body": {"n": at}}) for at in range(50)]
    trace.write_text("\n".join(lines))
    loads = {
        "Poisson": ["--rate", "100", "--duration-s", "0.5", "--warm-s", "0"],
        "trace": ["--trace", str(trace)],
    }
    figures_path = tmp_path / "figures"
    wanted = [*loads[kind], "-c", "1", "--json", str(figures_path)]
    assert main(flags(answering[1], *wanted)) == 0
    figures = json.loads(figures_path.read_text())
    assert figures["unfinished"] == 0
    assert 20 < figures["latency_ms"]["count"] == len(answering[0].asked) < 90
    # Due at an even pace over the 0.5 s: half of them waited for more than a quarter of a second.
    assert 150 < figures["latency_ms"]["p50"] < 400
    assert 150 < figures["ttft_ms"]["p50"] < 400
    assert figures["latency_ms"]["p99"] > 400


def test_a_closed_loop_has_every_stall_in_its_tail_and_only_there(
    answering: tuple[Answering, int], tmp_path: Path
) -> None:
    answering[0].answer, answering[0].stalls_s = TWO, [0.0, 0.3]
    figures_path = tmp_path / "figures"
    wanted = ["--duration-s", "1", "--warm-s", "0", "-c", "1", "--json", str(figures_path)]
    assert main(flags(answering[1], *wanted)) == 0
    figures = json.loads(figures_path.read_text())
    assert figures["latency_ms"]["p50"] < 100
    assert figures["latency_ms"]["max"] >= 300


def test_a_trace_is_replayed_body_by_body(
    answering: tuple[Answering, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answering[0].answer = TWO
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at_s": 0.1, "body": {"n": 2}}\n{"at_s": 0, "body": {"n": 1}}\n')
    assert main(flags(answering[1], "--trace", str(trace))) == 0
    assert answering[0].asked == [b'{"n": 1}', b'{"n": 2}']
    assert "requests    2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--url", "https://a"], "http://"),
        (["--trace", "/no/such/file"], "cannot be read"),
        (["--body", "/no/such/file"], "/no/such/file"),
        (["--url", "http://127.0.0.1:9/v1/completions"], "--body or --trace"),
        (["--rate", "1e-9"], "nothing is sent"),
    ],
)
def test_what_cannot_be_done_is_refused(
    more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(9, *more)) == 2
    assert message in capsys.readouterr().err
