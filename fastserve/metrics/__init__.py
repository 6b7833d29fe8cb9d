"""Numbers that are true for the whole server, whoever is asked: one block of shared memory."""
