"""Small OpenAI servers to compare with, each as its framework's users would write it.

    python -m bench.peers.NAME --port PORT --step-ms MS

    paced.py               the simulated engine that all of them share, in their own process
    dialect.py             requests and answers as plain dicts, and the command line
    raw_uvloop.py          no framework and no JSON: what a Python server cannot cost less than
    aiohttp_server.py      aiohttp, dicts and orjson
    starlette_granian.py   Starlette on granian, dicts and orjson
    fastapi_uvicorn.py     FastAPI on uvicorn, pydantic models, as most LLM servers are

None has a template, a tokenizer or a second process, which fastserve has: the comparison is kind to
them. What they stream is exactly what was asked for, and is checked like everyone's.
"""
