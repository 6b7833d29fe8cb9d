"""`fastserve check`: would a server with these settings start here, and serve well?

findings.py    one finding: what was looked at, how it is, and what to do about it
machine.py     this machine: processors, memory, descriptors, shared memory, MPI, GPUs
server.py      what a start would need: configuration, credentials, port, engine, model
command.py     the command: a table or JSON, and an exit code
"""
