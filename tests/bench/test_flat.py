"""Whether costs stay as they are: what is made of the measurements, and one that is real."""

from __future__ import annotations

import shutil

import pytest

from bench.flat import Point, served, summary


def point(at: int, cpu_us: float, **uss_mib: float) -> Point:
    return Point(at=at, cpu_us=cpu_us, per_s=1.0, uss_mib=uss_mib, others_share=0.0)


def test_the_first_slice_is_no_measure_of_the_others() -> None:
    told = summary(
        [
            point(0, 900.0, engine=10.0, acceptor=10.0),
            point(1000, 200.0, engine=20.0, acceptor=30.0),
            point(5000, 250.0, engine=20.0, acceptor=31.0),
            point(9000, 220.0, engine=20.5, acceptor=32.0),
        ],
        [point(1, 1000.0, acceptor=40.0), point(16, 50.0, acceptor=60.0),
         point(1040, 9.0, acceptor=66.0)],
    )  # fmt: skip
    assert told.split("\n") == [
        (
            "from request 1000 to 9000: 200 to 220 us a request (1.10 times); "
            "grown by acceptor +2.0 MiB, engine +0.5 MiB"
        ),
        "from 1 to 1040 streams: 1000.0 to 9.0 us a chunk",
        "each stream from 16 on takes acceptor 6.0 KiB",
    ]


@pytest.mark.skipif(shutil.which("cc") is None, reason="a C compiler makes the load generator")
def test_requests_are_served_and_measured() -> None:
    points = list(served(number=2000, slices=2, cores=(0, 0)))
    assert [each.at == 0 for each in points] == [True, *[False] * (len(points) - 1)]
    for each in points:
        assert each.cpu_us > 10
        assert {name: size > 5 for name, size in each.uss_mib.items()} == {
            "engine": True, "acceptor 0": True,
        }  # fmt: skip
