"""Which connections belong to a process group, and what shutting them down does to who waits on them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Collection

from edl.collective.inprocess.sockets import GroupSockets, find_connections, shut_down_connections
from tests.descriptors import count_descriptors


class Kernel:
    """The sockets of a process, as far as `GroupSockets` asks."""

    def __init__(self) -> None:
        self.open: dict[int, int] = {}
        self.shut: list[set[int]] = []

    def look(self) -> dict[int, int]:
        return dict(self.open)

    def shut_down(self, inodes: Collection[int]) -> int:
        self.shut.append(set(inodes))
        return len(inodes)

    def group(self, until_end: Collection[int] = ()) -> GroupSockets:
        return GroupSockets(until_end, find=self.look, shut_down=self.shut_down)


def test_new_sockets_belong_to_the_group() -> None:
    """What appears while the group is made is its own."""
    kernel = Kernel()
    kernel.open = {1: 3}  # somebody's, from before
    group = kernel.group()
    kernel.open |= {2: 4, 3: 5}
    group.end_tracking()
    kernel.open |= {4: 6}  # somebody's, from later
    assert group.shut_down() == 2
    assert kernel.shut == [{2, 3}]


def test_forming_group_is_broken() -> None:
    """A group that is being made is broken with what it waits on."""
    kernel = Kernel()
    kernel.open = {1: 3, 9: 4}
    group = kernel.group(until_end=[9])
    kernel.open |= {2: 5}
    group.shut_down()
    group.end_tracking()
    group.shut_down()
    assert kernel.shut == [{2, 9}, {2}]


def inode(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino


def pair() -> tuple[socket.socket, socket.socket, socket.socket]:
    """A listening socket, and the two ends of a connection."""
    listening = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listening.getsockname())
    other, _ = listening.accept()
    return listening, one, other


def test_only_tcp_connections_are_found() -> None:
    listening, one, other = pair()
    datagram = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    unix, peer = socket.socketpair()
    with listening, one, other, datagram, unix, peer:
        found = find_connections()
        assert {inode(one), inode(other)} <= found.keys()
        assert not {inode(listening), inode(datagram), inode(unix), inode(peer)} & found.keys()
        assert found[inode(one)] == one.fileno()


def test_who_waits_on_a_connection_is_woken() -> None:
    listening, one, other = pair()
    with listening, one, other:
        got: list[bytes] = []
        waiting = threading.Thread(target=lambda: got.append(one.recv(1)))
        waiting.start()
        assert shut_down_connections([inode(one)]) == 1
        waiting.join(10)
        assert got == [b""]
        assert other.recv(1) == b""  # and so is the other end
        shut_down_connections([inode(one)])  # once more does no harm


def test_a_listening_socket_is_never_touched() -> None:
    listening, one, other = pair()
    with listening, one, other:
        assert shut_down_connections([inode(listening)]) == 0
        with socket.create_connection(listening.getsockname()):
            listening.accept()[0].close()


def test_reused_descriptor_is_left_alone() -> None:
    """A descriptor that was used again is left alone."""
    listening, one, other = pair()
    with listening, one, other:
        old = inode(one)
        with socket.create_connection(listening.getsockname()) as following:
            os.dup2(following.fileno(), one.fileno())  # closes the old one; no other thread can get its number
            assert inode(one) == inode(following) != old
            assert shut_down_connections([old]) == 0
            accepted, _ = listening.accept()
            with accepted:
                accepted.sendall(b"x")
                assert following.recv(1) == b"x"


def test_nothing_is_left_open() -> None:
    listening, one, other = pair()
    with listening, one, other:
        before = count_descriptors("socket:", "anon_inode:[pidfd]", "/proc/")
        find_connections()
        shut_down_connections([inode(one)])
        assert count_descriptors("socket:", "anon_inode:[pidfd]", "/proc/") == before
