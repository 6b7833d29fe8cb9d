"""Requests that schemathesis makes up from the document, over real sockets: such as fit, and not.

No answer may be a 5xx, or other than the document says; what does not fit must be refused. What
fits may be refused for what no schema can say, so that check is left out.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.e2e.harness import Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# An unknown method is not implemented (RFC 9110, 15.6.2), and TRACE is meant to be unknown.
CONFIG = '[phases.coverage]\nunexpected-methods = ["DELETE", "GET", "PATCH", "POST", "PUT"]\n'


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # Of answers without a limit of their own there are many: short ones do.
    with Server(
        "--frontends", "2", "--engine", "sim", "--sim-step-ms", "0.05",
        "--engine-max-seq-len", "200",
    ) as server:  # fmt: skip
        yield server


def run(server: Server, directory: Path, *flags: str, timeout_s: float) -> str:
    """What schemathesis says when it has found nothing."""
    config = directory / "schemathesis.toml"
    config.write_text(CONFIG)
    done = subprocess.run(
        [
            sys.executable, "-m", "schemathesis.cli", "--no-color", "--config-file", str(config),
            "run", f"{server.url}/openapi.json", "--continue-on-failure",
            "--exclude-checks", "positive_data_acceptance", "--suppress-health-check", "all",
            *flags,
        ],
        cwd=directory, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_is_made_up_is_answered_as_the_document_says(server: Server, tmp_path: Path) -> None:
    said = run(
        server, tmp_path, "--phases", "examples,fuzzing,stateful", "--max-examples", "8",
        "--seed", "1", timeout_s=110,
    )  # fmt: skip
    _, operations = server.get("/openapi.json")
    # It does not ask for the document again.
    number = sum(len(item) for path, item in operations["paths"].items() if path != "/openapi.json")
    assert f"{number} selected / {number} total" in said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_edge_of_every_schema_is_kept(server: Server, tmp_path: Path) -> None:
    run(server, tmp_path, "--max-examples", "100", timeout_s=590)
