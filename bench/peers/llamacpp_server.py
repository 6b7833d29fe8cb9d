"""llama.cpp's own server, out of the wheel that carries the library; it serves until stdin closes.

    python -m bench.peers.llamacpp_server MODEL --sequences 32 --max-seq-len 512 --threads 2

Prints its port once it is ready. The library that fastserve drives is the same file.
"""

from __future__ import annotations

import argparse
import os
import sys

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--max-seq-len", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.n_parallel = options.sequences
    params.n_ctx = options.sequences * options.max_seq_len
    params.kv_unified = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.verbosity = -1
    server = xllamacpp.Server(params)
    sys.stdout.write(f"{server.listening_address.rpartition(':')[2]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    # Its threads serve for ever, and nothing of it is worth an orderly end.
    os._exit(0)


if __name__ == "__main__":
    main()
