"""HTTP/1.1 and server-sent events, by hand, over asyncio's transports.

Read in this order: application.py and message.py (the border and what crosses it), parser.py and
body.py (bytes to requests), reader.py (the two over one buffer), response.py and sse.py (answers to
bytes), exchange.py (one request and its answer), connection.py (the thin shell over the socket;
deadline.py and peer.py help it to tell when to stop waiting, and for whom), connections.py (all of
them, and how many there may be).

A library: it imports nothing of ours, and knows nothing of routes, JSON or generations.
"""
