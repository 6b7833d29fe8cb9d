"""What an acceptor runs: the one place where http1, api, text and lane meet.

acceptor.py is the process, accepting.py how it takes its share of connections, exchanges.py the
path of a request in order, in_flight.py and streams.py the path of a token.
"""
