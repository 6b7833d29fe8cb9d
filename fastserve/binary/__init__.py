"""`python -m fastserve.binary`: the whole server as one executable file.

build.py       collects interpreter, server, embedded engine and model (PyInstaller)
pack.py        puts what was collected behind the launcher: the format of the file
launcher.c     unpacks it once, and becomes the server
entry.py       what the collected interpreter runs

PyInstaller's own one-file mode unpacks at every start, and stays as the parent of the server: a
process more between an init and the supervisor, and a directory that is left behind when that is
killed. Here the file unpacks itself once for each version, into the user's cache, and then is the
server: the same pid, signals and exit code as the installed command.
"""
