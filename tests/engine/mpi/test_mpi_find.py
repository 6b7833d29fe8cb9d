"""Ranks are told from strangers and from their own helpers, and their end is seen."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fastserve.engine.mpi_find import find_ranks
from fastserve.engine.mpi_watch import IdentityWatch

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_a_rank_is_who_was_given_its_number_and_not_who_inherited_it() -> None:
    script = "import subprocess; subprocess.run(['sleep', '60'])"
    with (
        child(sys.executable, "-c", script, OMPI_COMM_WORLD_RANK="0") as rank,
        child("sleep", "60") as stranger,
    ):
        helpers = Path(f"/proc/{rank.pid}/task/{rank.pid}/children")
        wait_for(helpers)
        helper = int(helpers.read_text())
        assert [one.pid for one in find_ranks()] == [rank.pid]
        os.kill(helper, signal.SIGKILL)
        assert stranger.poll() is None


def test_a_rank_of_another_job_than_its_parent_is_a_rank_too() -> None:
    environment = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "daemons"}
    script = (
        "import os, subprocess;"
        "subprocess.run(['sleep', '60'], env=os.environ | {'PMIX_NAMESPACE': 'ranks'})"
    )
    with child(sys.executable, "-c", script, **environment) as daemon:
        ranks = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children")
        wait_for(ranks)
        pid = int(ranks.read_text())
        wait_for(Path(f"/proc/{pid}/environ"), what=b"PMIX_NAMESPACE=ranks")
        assert [one.pid for one in find_ranks()] == sorted([daemon.pid, pid])
        os.kill(pid, signal.SIGKILL)


def test_the_end_of_a_rank_is_seen_and_whose_it_was() -> None:
    with child("sleep", "60", PMI_RANK="0") as one, child("sleep", "60", PMI_RANK="1") as two:
        watch = IdentityWatch(find_ranks())
        assert [each.pid for each in watch.local] == sorted([one.pid, two.pid])
        assert watch.exited() == []
        two.kill()
        assert select.select((watch.fd,), (), (), 10)[0]
        [exited] = watch.exited()
        assert (exited.rank, exited.pid) == (1, two.pid)
        watch.kill()  # those that are gone are no error
        watch.close()


@contextmanager
def child(*command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env=os.environ | environment)
    try:
        # Until it has become what it is to be, it looks like us.
        for name in environment:
            wait_for(Path(f"/proc/{process.pid}/environ"), what=name.encode())
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(file: Path, *, what: bytes = b"") -> None:
    """Wait until this file of another process has something in it, or `what`."""
    deadline_s = time.monotonic() + 10
    while not (content := file.read_bytes()) or what not in content:
        assert time.monotonic() < deadline_s, f"{what!r} never came"
        time.sleep(0.001)
