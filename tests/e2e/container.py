"""A server as a container runtime starts it, without one: in namespaces of its own.

It is process 1, an unknown user without capabilities, home or environment; every file system is
read-only but a tmpfs at /tmp and /dev/shm, which has the 64 MiB that Docker gives. What runs there
is the package under test and this interpreter, at their own paths, which that user can reach there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

import fastserve
from tests.e2e.harness import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

UID = 64_321
NOFILE = 4096

_NAMESPACES = ("unshare", "--fork", "--pid", "--mount-proc", "--mount", "--ipc", "--kill-child")

# $1: what to mount at /tmp, tmpfs or nothing; $2: folders at the top, which empty ones replace;
# $3: how many directories follow that are kept at their paths; then the command, the directory of
# whose port file is kept, too, and may be written.
_SET_UP = f"""
set -e
tmp=$1; tops=$2; count=$3; shift 3
mount -t tmpfs -o mode=755 none /mnt
each=0; kept=
while [ $each -lt $count ]; do
    mkdir /mnt/$each; mount --bind "$1" /mnt/$each
    kept="$kept $1"; each=$((each + 1)); shift
done
for word; do
    if [ "$before" = --port-file ]; then
        shared=${{word%/*}}; kept="$kept $shared"
        mkdir /mnt/$each; mount --bind "$shared" /mnt/$each; chmod 777 "$shared"
    fi
    before=$word
done
for top in $tops; do mount -t tmpfs -o mode=755 none $top; done
each=0
for path in $kept; do
    mkdir -p $path; mount --move /mnt/$each $path; each=$((each + 1))
done
for top in $tops; do
    if [ $top = /tmp ] && [ $tmp = tmpfs ]; then
        chmod 1777 /tmp; mount -o remount,noexec,nosuid,nodev,size=64m /tmp
    else mount -o remount,bind,ro $top; fi
done
while umount /dev/shm 2>/dev/null; do :; done
mount -t tmpfs -o mode=1777,noexec,nosuid,nodev,size=64m none /dev/shm
mount -o remount,bind,ro /
cd /
exec prlimit --nofile={NOFILE // 4}:{NOFILE} setpriv --reuid {UID} --regid {UID} --clear-groups \\
    --no-new-privs --inh-caps=-all --bounding-set=-all env -i "$@"
"""


def contained(*command: str, writable: bool = True) -> list[str]:
    """A command line that runs `fastserve *command` in a container. `writable`: with a tmpfs at
    /tmp, as docker's --tmpfs /tmp mounts it."""
    package = str(Path(fastserve.__file__).parents[1])
    needed = {sys.base_prefix, sys.prefix, package, *filter(os.path.isdir, filter(None, sys.path))}
    needed = {path for path in needed if len(Path(path).parts) > 2}
    needed = {path for path in needed if not any(_is_in(path, other) for other in needed)}
    tops = {"/tmp", *(_top(path) for path in needed if not _reachable(Path(path)))}
    kept = sorted(path for path in needed if _top(path) in tops)
    return [
        *_NAMESPACES, "sh", "-c", _SET_UP, "sh", "tmpfs" if writable else "nothing",
        " ".join(sorted(tops)), str(len(kept)), *kept, sys.executable, "-m", "fastserve", *command,
    ]  # fmt: skip


def _is_in(path: str, other: str) -> bool:
    return path != other and Path(path).is_relative_to(other)


def _top(path: str) -> str:
    return "/" + Path(path).parts[1]


def _reachable(path: Path) -> bool:
    """Whether everybody may go there."""
    return all(each.stat().st_mode & 0o001 for each in (path, *path.parents))


@cache
def why_not() -> str:
    """Why nothing can be contained here; empty if it can."""
    for program in ("unshare", "setpriv", "prlimit", "nsenter"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    tried = subprocess.run(contained("--version"), capture_output=True, text=True, check=False)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Contained(Server):
    """A server in a container. `process` is unshare, which exits as the server does."""

    def __init__(self, *flags: str, writable: bool = True) -> None:
        # Unset, so that the run directory is where a server without flags has it.
        flags = (*flags, "--run-directory", "")
        super().__init__(*flags, program=tuple(contained(writable=writable)))

    @property
    def supervisor(self) -> psutil.Process:
        # Not by its title: there is no room for one where the environment is empty.
        [process] = psutil.Process(self.process.pid).children()
        return process

    def inside(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the system in the server's container."""
        enter = ["nsenter", "-t", str(self.supervisor.pid), "-p", "-m"]
        return subprocess.run([*enter, *command], capture_output=True, text=True, check=False)


@contextlib.contextmanager
def container(*flags: str, writable: bool = True) -> Iterator[Contained]:
    """A server that is to end by itself or by a signal to process 1, and leave nothing."""
    server = Contained(*flags, writable=writable)
    try:
        yield server
        server.process.wait(10.0)
        server.assert_nothing_left()
    except BaseException:
        print(server.log)
        raise
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            server.remember_processes()
        server.kill_everything()
