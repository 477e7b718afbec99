"""The TCP connections of a process group, found from outside, so that they can be shut down.

A rank that waits in a collective of gloo's can be woken in no other way than by a break of its connections.
`ProcessGroup.abort` called from another thread ends neither `Work.wait` nor a backward pass of
`DistributedDataParallel`, and closing a file descriptor ends no wait on it; `shutdown(2)` does. gloo does not tell
which connections are its own, so a group's are the connections that appeared while it was made. A listening socket is
never touched: gloo takes an error of its own for a bug, and aborts the process.

Linux only: connections are read from `/proc/self/fd`.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

__all__ = ["GroupSockets", "find_connections", "shut_down_connections"]

_LINK = re.compile(r"socket:\[(\d+)\]")


def find_connections() -> dict[int, int]:
    """Return this process's TCP sockets that do not listen: inode -> a file descriptor."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since, or not a socket
            match = _LINK.fullmatch(str(entry.readlink()))
            if match and _with_socket(int(entry.name), int(match[1]), _is_connection):
                found[int(match[1])] = int(entry.name)
    return found


def shut_down_connections(inodes: Collection[int]) -> int:
    """Shut connections down in both directions, which ends all waits on them.

    Args:
        inodes: of the connections.

    Returns:
        How many of them there were.
    """
    found = find_connections()
    return sum(1 for inode in inodes if inode in found and _with_socket(found[inode], inode, _shut_down))


class GroupSockets:
    """The connections of a process group: all that appear from now until `end_tracking`.

    Args:
        until_end: inodes of other connections that a thread may wait on while it makes the group, and not afterwards.
        find: returns the inodes of all connections of this process now, as keys.
        shut_down: shuts the connections of the given inodes down, and returns how many there were.
    """

    def __init__(
        self,
        until_end: Collection[int] = (),
        *,
        find: Callable[[], Mapping[int, int]] = find_connections,
        shut_down: Callable[[Collection[int]], int] = shut_down_connections,
    ) -> None:
        self._find = find
        self._shut_down = shut_down
        self._until_end = frozenset(until_end)
        self._before = frozenset(find())
        self._own: frozenset[int] | None = None

    def end_tracking(self) -> None:
        """Take the connections of now for the group's, and none that appear later."""
        self._own = frozenset(self._find()) - self._before

    def shut_down(self) -> int:
        """Shut the group's connections down. From any thread, also while the group is being made.

        Returns:
            How many there were.
        """
        present = frozenset(self._find()) - self._before | self._until_end
        return self._shut_down(present if self._own is None else self._own)


def _with_socket(number: int, inode: int, function: Callable[[socket.socket], bool]) -> bool:
    """Call a function with the socket behind a file descriptor; False if it is no longer the socket of `inode`."""
    with contextlib.suppress(OSError):
        copy = os.dup(number)  # its owner may close it at any moment; the copy stays what it is
        try:
            status = os.fstat(copy)
            if status.st_ino != inode or not stat.S_ISSOCK(status.st_mode):
                return False
            with socket.socket(fileno=os.dup(copy)) as own:
                return function(own)
        finally:
            os.close(copy)
    return False


def _is_connection(found: socket.socket) -> bool:
    return (
        found.family in (socket.AF_INET, socket.AF_INET6)
        and found.type == socket.SOCK_STREAM
        and not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )


def _shut_down(found: socket.socket) -> bool:
    if not _is_connection(found):
        return False
    found.shutdown(socket.SHUT_RDWR)  # raises where it is not connected, or no more
    return True
