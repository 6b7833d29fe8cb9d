"""Measurements: `python -m bench` compares servers, `fastserve bench` loads one.

    __main__.py     run (compare servers), micro (each room by itself)
    works.py        what is asked of each server, in one table
    servers.py      who is asked: fastserve, its peers, and how each is started
    compare.py      rounds, interleaved; what others disturbed is measured again
    report.py       JSON and Markdown; plots.py draws
    peers/          small servers to compare with
    micro.py        a budget for each room
    aims.py         figures beside their aims; aims_parts.py measures them

Other modules are programs of their own: each says what it measures, and prints figures.
"""
