"""`fastserve top`: a running server, live, in a terminal.

scrape.py     what `/metrics` and `/health` say at one moment
figures.py    what two such moments say of the time between them
view.py       the screen (rich)
command.py    the command; `--once --json` for programs

All of it comes over the network, from any acceptor: the server may be anywhere.
"""
