"""A lane: the ordered, two-way path of messages between one acceptor and the engine.

    acceptor 0 --PUSH--> +---------+
    acceptor 1 --PUSH--> | ingress |  PULL, bound by the engine
    acceptor 2 --PUSH--> +---------+
    acceptor 0 <--PULL-- lane 0       each bound by its acceptor; the engine PUSHes
    acceptor 1 <--PULL-- lane 1

All sockets are ipc:// in one directory that only its owner can enter. messages.py says what
crosses, codec.py in which bytes, client.py and server.py are the two ends.
"""
