"""Measurements: `python -m bench` compares servers, and tells of the rest.

    __main__.py     run (compare servers), load (any URL), micro (each room by itself)
    works.py        what is asked of each server, in one table
    servers.py      who is asked: fastserve, its peers, and how each is started
    compare.py      rounds, interleaved; what others disturbed is measured again
    report.py       JSON and Markdown; plots.py draws
    loadgen/        the load generator, in C
    peers/          small servers to compare with
    cpu.py          who used the CPU
    micro.py        a budget for each room

Other modules are programs of their own: each says what it measures, and prints figures.
"""
