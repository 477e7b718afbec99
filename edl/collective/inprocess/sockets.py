"""The TCP connections of a process group, found from outside, so that they can be shut down.

A rank that waits in one of gloo's collectives can be woken in one way only: its connections break. `ProcessGroup.abort`
called from another thread wakes it neither from `Work.wait` nor from a backward pass of `DistributedDataParallel`, and
closing a file descriptor does not wake who waits on it; `shutdown(2)` does. gloo does not say which connections are
its own, so those count that appeared while the group was made. A listening socket is never touched: gloo takes an
error of its own for a bug, and aborts the process.

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

__all__ = ["GroupSockets", "connections", "shut_down"]

_LINK = re.compile(r"socket:\[(\d+)\]")


def connections() -> dict[int, int]:
    """This process's TCP sockets that do not listen: inode -> a file descriptor."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since, or not a socket
            match = _LINK.fullmatch(str(entry.readlink()))
            if match and _with_socket(int(entry.name), int(match[1]), _connects):
                found[int(match[1])] = int(entry.name)
    return found


def shut_down(inodes: Collection[int]) -> int:
    """Shut the connections down, both ways, whoever waits on them. Returns how many there were."""
    found = connections()
    return sum(1 for inode in inodes if inode in found and _with_socket(found[inode], inode, _shut))


class GroupSockets:
    """The connections of a process group: those that appear while it is made, from now until `done`.

    Args:
        until_done: others that who makes the group may wait on, but nobody afterwards.
        look: the inodes of all connections of this process now, as keys.
        shut: shuts those of the given inodes down.
    """

    def __init__(
        self,
        until_done: Collection[int] = (),
        *,
        look: Callable[[], Mapping[int, int]] = connections,
        shut: Callable[[Collection[int]], int] = shut_down,
    ) -> None:
        self._look = look
        self._shut = shut
        self._until_done = frozenset(until_done)
        self._before = frozenset(look())
        self._own: frozenset[int] | None = None

    def done(self) -> None:
        """The group is made: what connects from now on is somebody else's."""
        self._own = frozenset(self._look()) - self._before

    def shut_down(self) -> int:
        """Break the group's connections. From any thread, also while the group is being made; returns how many."""
        making = frozenset(self._look()) - self._before | self._until_done
        return self._shut(making if self._own is None else self._own)


def _with_socket(number: int, inode: int, act: Callable[[socket.socket], bool]) -> bool:
    """Act on the socket behind a file descriptor, if it is still the one of `inode`. False if it is not."""
    with contextlib.suppress(OSError):
        copy = os.dup(number)  # its owner may close it at any moment; the copy stays what it is
        try:
            status = os.fstat(copy)
            if status.st_ino != inode or not stat.S_ISSOCK(status.st_mode):
                return False
            with socket.socket(fileno=os.dup(copy)) as own:
                return act(own)
        finally:
            os.close(copy)
    return False


def _connects(one: socket.socket) -> bool:
    return (
        one.family in (socket.AF_INET, socket.AF_INET6)
        and one.type == socket.SOCK_STREAM
        and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )


def _shut(one: socket.socket) -> bool:
    if not _connects(one):
        return False
    one.shutdown(socket.SHUT_RDWR)  # raises where it is not connected, or no more
    return True
