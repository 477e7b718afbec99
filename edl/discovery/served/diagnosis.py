"""Why no store answers at an address, in words that say what to do."""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Final, NamedTuple

__all__ = ["Diagnosis", "diagnose"]

_TIMEOUT_S: Final = 2.0
"""To connect, and then to be answered: a host within reach takes milliseconds, and the user waits for the words."""
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""What a client of HTTP/2, and so of gRPC, says first, with a frame of settings (RFC 9113, 3.4)."""
_SETTINGS: Final = 4
"""The type of the frame that a server of HTTP/2 sends first (RFC 9113, 6.5)."""


class Diagnosis(NamedTuple):
    """What a connection shows.

    Attributes:
        words: what to do; empty where a gRPC server answers.
        final: it does not pass by itself.
        connected: something listens there.
    """

    words: str
    final: bool = False
    connected: bool = True


def diagnose(host: str, port: int) -> Diagnosis:
    """Connect, and find out what answers. Takes some 4 s at most, and the resolver's time."""
    try:
        with socket.create_connection((host, port), timeout=_TIMEOUT_S) as connection:
            connection.settimeout(_TIMEOUT_S)
            return _greet(connection, port)
    except socket.gaierror as exc:
        return Diagnosis(
            f"the name {host} cannot be resolved here ({exc.strerror}): correct it, or write the address",
            connected=False,
        )
    except TimeoutError:
        return Diagnosis(
            f"nothing answers, not even with a refusal: {host} is down, or a firewall drops it; open its TCP port "
            f"{port} for this node",
            connected=False,
        )
    except ConnectionRefusedError:
        return Diagnosis(
            f"nobody listens at that port: start the same command on {host}; if it runs there, see that the port is "
            "the same",
            connected=False,
        )
    except OSError as exc:
        if exc.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            return Diagnosis(
                f"there is no way to it ({exc.strerror}): see routes and firewalls between this node and {host}",
                connected=False,
            )
        return Diagnosis(f"the connection fails ({exc.strerror or exc})", connected=False)


def _greet(connection: socket.socket, port: int) -> Diagnosis:
    answer = b""
    try:
        connection.sendall(_PREFACE)
        while len(answer) < 9 and (part := connection.recv(9 - len(answer))):
            answer += part
    except TimeoutError:
        return Diagnosis(
            f"what listens there says nothing: another program (torchrun's own store, perhaps), or an agent that is "
            f"stopped; if port {port} is another program's, choose another one on all nodes"
        )
    except OSError:
        answer = b""
    with contextlib.suppress(IndexError):
        if answer[3] == _SETTINGS:
            return Diagnosis("")
    if not answer:
        return Diagnosis(
            "connections are accepted and closed at once: by a proxy that finds no store behind it, or by another "
            "program than EDL"
        )
    return Diagnosis(
        f"another program than EDL answers there: choose another port than {port}, the same on all nodes", final=True
    )
