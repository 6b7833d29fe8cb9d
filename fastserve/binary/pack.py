"""The format of the one file: a launcher, and behind it everything that it unpacks.

    the launcher's ELF image
    entries    type ("D", "F", "L"), mode, length of the path, length of the content (<c3xIIQ);
               the path, relative; the content (of a link: where it leads)
    trailer    offset of the first entry, number of entries, digest, magic (<QQ16s16s)

Numbers are little-endian. The digest, of all entries, names the directory into which they go: a
file of another version goes elsewhere, and one that was unpacked before need not be again.

launcher.c reads what this writes.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

MAGIC = b"fastserve-file-1"
_ENTRY = struct.Struct("<c3xIIQ")
_TRAILER = struct.Struct("<QQ16s16s")
_COPY_BYTES = 1 << 20


def pack(launcher: Path, tree: Path, out: Path) -> None:
    """Write `out`, an executable that unpacks `tree` and runs the program `fastserve` in it.

    Whole or not at all: it is renamed into its place.
    """
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    digest = hashlib.sha256()
    number = 0
    try:
        with unfinished.open("wb") as file:
            file.write(launcher.read_bytes())
            begin = file.tell()
            for path in _walk(tree):
                _write_entry(file, digest, path, name=str(path.relative_to(tree)))
                number += 1
            file.write(_TRAILER.pack(begin, number, digest.digest()[:16], MAGIC))
        unfinished.chmod(0o755)
        unfinished.rename(out)
    finally:
        unfinished.unlink(missing_ok=True)


def _walk(directory: Path) -> Iterator[Path]:
    """Everything below, each directory before what is in it; always in the same order."""
    for path in sorted(directory.iterdir()):
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)


def _write_entry(file: BinaryIO, digest: hashlib._Hash, path: Path, *, name: str) -> None:
    status = path.lstat()
    encoded = os.fsencode(name)

    def put(data: bytes) -> None:
        digest.update(data)
        file.write(data)

    def head(kind: bytes, length: int) -> bytes:
        return _ENTRY.pack(kind, stat.S_IMODE(status.st_mode), len(encoded), length) + encoded

    if path.is_symlink():
        leads_to = os.fsencode(os.readlink(path))
        put(head(b"L", len(leads_to)) + leads_to)
    elif path.is_dir():
        put(head(b"D", 0))
    else:
        put(head(b"F", status.st_size))
        with path.open("rb") as content:
            while data := content.read(_COPY_BYTES):
                put(data)
