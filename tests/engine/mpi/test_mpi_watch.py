"""Ranks are known by pid and start time: neither a zombie nor a stranger with its pid is one."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil
import pytest

from fastserve.engine.mpi_watch import (
    IdentityWatch,
    ProcessKey,
    RankIdentity,
    descendants,
    kill_all,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

# The kernel needs a moment, a busy machine some more.
TOLD_TIMEOUT_S = 5.0


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing until it is killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def identity_of(process: subprocess.Popen[bytes], *, rank: int = 0) -> RankIdentity:
    return replace(
        RankIdentity.of_this_process(rank=rank),
        pid=process.pid,
        started_s=psutil.Process(process.pid).create_time(),
    )


def is_told(watch: IdentityWatch, *, timeout_s: float = TOLD_TIMEOUT_S) -> bool:
    return bool(select.select((watch.fd,), (), (), timeout_s)[0])


def test_this_process_knows_who_it_is() -> None:
    identity = RankIdentity.of_this_process(rank=3)

    assert (identity.rank, identity.pid) == (3, os.getpid())
    assert identity.started_s == psutil.Process().create_time()
    assert identity.is_local


def test_a_rank_that_lives_says_nothing(process: subprocess.Popen[bytes]) -> None:
    watch = IdentityWatch([identity_of(process)])

    assert not is_told(watch, timeout_s=0.0)
    assert watch.exited() == []
    watch.close()


def test_the_exit_of_a_rank_is_told_though_nobody_reaps_it(
    process: subprocess.Popen[bytes],
) -> None:
    this = RankIdentity.of_this_process(rank=0)
    that = identity_of(process, rank=1)
    watch = IdentityWatch([this, that])
    process.kill()

    assert is_told(watch)
    assert watch.exited() == [that]
    assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    watch.close()


def test_a_zombie_has_exited_from_the_start(process: subprocess.Popen[bytes]) -> None:
    identity = identity_of(process)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    watch = IdentityWatch([identity])

    assert is_told(watch, timeout_s=0.0)
    assert watch.exited() == [identity]
    watch.close()


def test_a_pid_that_nobody_has_has_exited_from_the_start(process: subprocess.Popen[bytes]) -> None:
    identity = identity_of(process)
    process.kill()
    process.wait()
    watch = IdentityWatch([identity])

    assert is_told(watch, timeout_s=0.0)
    assert watch.exited() == watch.local == [identity]
    watch.close()


def test_a_stranger_with_the_same_pid_is_no_rank_and_is_left_alone(
    process: subprocess.Popen[bytes],
) -> None:
    identity = identity_of(process)
    recycled = replace(identity, started_s=identity.started_s - 60.0)
    watch = IdentityWatch([recycled])

    assert is_told(watch, timeout_s=0.0)
    assert watch.exited() == [recycled]
    watch.kill()
    kill_all([ProcessKey(process.pid, recycled.started_s)])
    assert process.poll() is None
    watch.close()


@pytest.mark.parametrize("elsewhere", [{"host": "another"}, {"pid_namespace": 1}])
def test_the_pid_of_another_host_or_container_means_nothing_here(
    elsewhere: dict[str, str | int], process: subprocess.Popen[bytes]
) -> None:
    remote = replace(identity_of(process), **elsewhere)  # type: ignore[arg-type] # both are fields
    watch = IdentityWatch([remote])
    watch.kill()
    process.stdin.close()  # type: ignore[union-attr] # it is a pipe
    process.wait()

    assert watch.remote == [remote]
    assert not is_told(watch, timeout_s=0.0)
    assert process.returncode != -signal.SIGKILL
    watch.close()


def test_a_stopped_rank_is_seen_and_can_be_killed(process: subprocess.Popen[bytes]) -> None:
    identity = identity_of(process)
    watch = IdentityWatch([identity])
    assert watch.stopped() == []
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)

    assert watch.stopped() == [identity]
    assert watch.exited() == []
    watch.kill()
    assert process.wait() == -signal.SIGKILL
    watch.close()
    watch.close()


def test_a_launcher_is_killed_before_it_can_react(process: subprocess.Popen[bytes]) -> None:
    """It would kill us for the death of its child, as hydra does: here it would leave a line."""
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "print('started', flush=True)\n"
        "child.wait()\n"
        "print('reacted', flush=True)\n"
    )
    before = descendants()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"started\n"
        job = descendants() - before
        assert len(job) == 2
        kill_all(job)

        assert launcher.stdout.read() == b""
    assert launcher.returncode == -signal.SIGKILL
    assert process.poll() is None, "it was there before, so it is not of the job"
