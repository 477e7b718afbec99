"""The user of a TCP socket of this host, by sock_diag(7): in microseconds, where /proc/net/tcp takes milliseconds."""

from __future__ import annotations

import ipaddress
import socket
import struct
from typing import TypeAlias

__all__ = ["Address", "user_of_socket"]

Address: TypeAlias = "tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]"

_NETLINK_SOCK_DIAG = 4  # linux/netlink.h
_SOCK_DIAG_BY_FAMILY = 20  # linux/sock_diag.h
_REQUEST = 1  # NLM_F_REQUEST
_HEADER = struct.Struct("=IHHII")  # nlmsghdr
_ID = struct.Struct("!HH16s16s")  # inet_diag_sockid: ports and addresses; an interface and a cookie follow
_ANY = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # any interface, any cookie
_ESTABLISHED = 1  # TCP_ESTABLISHED of net/tcp_states.h
_UID_AT = _HEADER.size + 4 + _ID.size + len(_ANY) + 12  # in inet_diag_msg, behind timer and queues
_TIMEOUT_S = 1.0  # the kernel answers at once


def user_of_socket(local: Address, remote: Address) -> int | None:
    """Return the user of an established socket.

    Args:
        local: address and port of this end.
        remote: address and port of the other end.

    Returns:
        The user id; None if there is no such socket.

    Raises:
        OSError: this system does not tell.
    """
    (host, port), (other, other_port) = local, remote
    family = socket.AF_INET if host.version == 4 else socket.AF_INET6
    ends = _ID.pack(port, other_port, host.packed.ljust(16, b"\0"), other.packed.ljust(16, b"\0"))
    body = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + ends + _ANY
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_TIMEOUT_S)
        kernel.send(_HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST, 1, 0) + body)
        answer = kernel.recv(4096)
    _, kind, *_ = _HEADER.unpack_from(answer)
    if kind != _SOCK_DIAG_BY_FAMILY or answer[_HEADER.size + 1] != _ESTABLISHED:
        return None  # an error message, or somebody who listens there
    (user,) = struct.unpack_from("=I", answer, _UID_AT)
    return int(user)
