"""How models write tool calls into their texts: a file for each way, and `formats.py` for them all.

Each format is a generator over a Source (source.py), which reads a text as it comes and says what
its parts are. What is said does not depend on how the text was sliced.
"""
