from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from fastserve.load.cpu import Meter, Reading, cores_busy_s, pinned, process_cpu_s, usage

STAT = """\
cpu  9 9 9 9 9 9 9 9 9 9
cpu0 100 20 30 5000 600 7 8 9 10 11
cpu1 1000 0 0 0 0 0 0 0 0 0
cpu10 1 1 1 1 1 1 1 1 1 1
intr 12345
"""


def test_a_core_is_busy_but_when_idle_or_waiting_for_a_disk() -> None:
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    assert cores_busy_s({0}, stat=STAT) == (100 + 20 + 30 + 7 + 8 + 9) / ticks_per_s
    assert cores_busy_s({0, 1}, stat=STAT) == (174 + 1000) / ticks_per_s


def test_the_clock_of_a_process_is_its_cpu_time() -> None:
    before_s = time.process_time()
    read_s = process_cpu_s(os.getpid())
    assert read_s is not None
    assert before_s <= read_s <= time.process_time()


def test_a_process_that_is_gone_has_no_clock() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert process_cpu_s(process.pid) is None


def reading(at_s: float, by_process: dict[int, float], busy_s: float) -> Reading:
    return Reading(at_s=at_s, by_process=by_process, busy_s=busy_s)


@pytest.mark.parametrize(
    ("last", "num_cores", "server_s", "others_share"),
    [
        pytest.param(reading(2, {1: 1.5, 2: 1.0}, 11.5), 1, 1.5, 0.0, id="alone"),
        pytest.param(reading(2, {1: 1.5, 2: 1.0}, 12.0), 1, 1.5, 0.25, id="disturbed"),
        pytest.param(reading(2, {1: 1.5, 2: 1.0}, 12.0), 2, 1.5, 0.125, id="of two cores"),
        pytest.param(reading(2, {1: 1.5, 2: 1.0, 3: 0.2}, 12), 1, 1.7, 0.15, id="a new process"),
        pytest.param(reading(2, {1: 1.5}, 11.0), 1, 1.0, 0.0, id="one is gone"),
        pytest.param(reading(2, {1: 1.5, 2: 1.0}, 11.4), 1, 1.5, 0.0, id="ticks round down"),
    ],
)
def test_what_the_server_did_not_use_others_did(
    last: Reading, num_cores: int, server_s: float, others_share: float
) -> None:
    found = usage(reading(0, {1: 0.5, 2: 0.5}, 10.0), last, num_cores=num_cores)
    assert found.server_s == pytest.approx(server_s)
    assert found.others_share == pytest.approx(others_share)


def test_a_meter_counts_descendants() -> None:
    burn = "import time\nwhile time.process_time() < 0.2: pass\n"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); input()"
    with subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE) as process:
        meter = Meter(process.pid, cores=os.sched_getaffinity(0))
        meter.read()
        deadline_s = time.monotonic() + 30
        while True:
            meter.read()
            if meter.usage().server_s > 0.1:
                break
            assert time.monotonic() < deadline_s
        assert len(meter.readings[-1].by_process) == 2
        process.kill()


def test_what_is_spawned_while_pinned_stays_there() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    with pinned({core}):
        command = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
        assert subprocess.check_output(command, text=True).strip() == str({core})
    assert os.sched_getaffinity(0) == before
