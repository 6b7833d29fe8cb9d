"""The parent of everything: spawns, watches, tears down; serves nothing.

child.py has one child's states and verbs, policy.py decides without acting, supervisor.py watches
and acts, and the rest are the things it owns: the port, the run directory.
"""
