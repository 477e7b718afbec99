"""How agents talk about replicas: two sides that know the job's secret, and authenticated frames over TCP.

::

    receiver -> sender   32 random bytes
    sender -> receiver   32 random bytes, HMAC(secret, "sender" | both)
    receiver -> sender   HMAC(secret, "receiver" | both)
    then, for each part of the state
    sender -> receiver   frame: JSON that says what comes (`Announcement`)
    receiver -> sender   frame: `GO_ON`, or `PRESENT` if it has that, or else why it refuses it
    sender -> receiver   the data and the metadata as they are, and their HMAC; not if it is present
    receiver -> sender   frame: `GO_ON`, now that it has all

A frame is its length (4 bytes, little-endian), so many bytes, and their HMAC. The key of those is made of the secret
and both sides' random bytes, and each HMAC counts in how many were sent before it, so that nothing can be changed,
repeated or left out. All HMACs are HMAC-SHA256. Nothing is believed, and no memory taken, before the other side has
shown that it knows the secret. What is sent can be read by whoever reads the network, unless the connection is one of
TLS (`edl.protocol.peers`), within which all of this is said.

Every operation on the socket has a deadline.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final

from edl.errors import ProtocolError, TemporaryError

__all__ = ["CHUNK_NBYTES", "GO_ON", "HANDSHAKE_S", "PRESENT", "Announcement", "Link", "translated"]

CHUNK_NBYTES: Final = 1 << 20
GO_ON: Final = b""
PRESENT: Final = b"present"
_NONCE_NBYTES: Final = 32
_MAC_NBYTES: Final = 32
_FRAME_MOST_NBYTES: Final = 1 << 16
_META_MOST_NBYTES: Final = 1 << 30
HANDSHAKE_S: Final = 5.0
_NODE: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")


@dataclass(frozen=True)
class Announcement:
    """What is sent next: the state of one worker.

    Attributes:
        node: who sends it.
        local_rank: of the worker on that node.
        generation, step, world, rank: the label of its slot.
        data_nbytes, meta_nbytes: how much will come.
        before: generation, step and world of the state that the sender holds besides; newer ones that the receiver has
            were given up.
    """

    node: str
    local_rank: int
    generation: int
    step: int
    world: int
    rank: int
    data_nbytes: int
    meta_nbytes: int
    before: tuple[int, int, int]

    def encode(self) -> bytes:
        """JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Announcement:
        """The inverse of `encode`.

        Raises:
            ProtocolError: the bytes are something else, or say what cannot be.
        """
        try:
            fields = json.loads(data)
            told = cls(**{**fields, "before": tuple(fields["before"])})
        except (ValueError, TypeError, KeyError) as exc:
            raise ProtocolError(f"not the announcement of a replica: {data[:200]!r} ({exc})") from exc
        numbers = (told.local_rank, told.generation, told.step, told.world, told.rank, told.data_nbytes)
        possible = (
            isinstance(told.node, str)
            and _NODE.fullmatch(told.node) is not None
            and all(type(one) is int for one in (*numbers, told.meta_nbytes, *told.before))
            and all(0 <= one < 1 << 62 for one in numbers)
            and told.rank < told.world
            and 0 <= told.meta_nbytes <= _META_MOST_NBYTES
            and len(told.before) == 3
        )
        if not possible:
            raise ProtocolError(f"an impossible announcement of a replica: {told}")
        return told


class Link:
    """An authenticated connection. Whatever is raised, it is good for nothing afterwards.

    Args:
        connection: stays the caller's to close.
        timeout_s: of each operation on it.
    """

    def __init__(self, connection: socket.socket, secret: bytes, *, sending: bool, timeout_s: float) -> None:
        """Shake hands.

        Raises:
            ProtocolError: the other side does not know the secret, or speaks something else.
            OSError: the connection failed, or an operation took too long.
        """
        self._connection = connection
        self._sent = self._received = 0
        deadline = time.monotonic() + HANDSHAKE_S
        mine = secrets.token_bytes(_NONCE_NBYTES)
        if sending:
            theirs = self._take(_NONCE_NBYTES, deadline)
            both = theirs + mine
            connection.sendall(mine + _mac(secret, b"sender", both))
            proof = self._take(_MAC_NBYTES, deadline)
        else:
            connection.settimeout(HANDSHAKE_S)
            connection.sendall(mine)
            both = mine + self._take(_NONCE_NBYTES, deadline)
            proof = self._take(_MAC_NBYTES, deadline)
        if not hmac.compare_digest(proof, _mac(secret, b"receiver" if sending else b"sender", both)):
            raise ProtocolError("the other side does not know the secret of this job")
        if not sending:
            connection.sendall(_mac(secret, b"receiver", both))
        kinds = (b"to receiver", b"to sender") if sending else (b"to sender", b"to receiver")
        self._send_key, self._receive_key = (_mac(secret, kind, both) for kind in kinds)
        connection.settimeout(timeout_s)

    def send_frame(self, data: bytes) -> None:
        """Send a message of up to 64 KiB."""
        mac = self._next_sent()
        mac.update(data)
        self._connection.sendall(len(data).to_bytes(4, "little") + data + mac.digest())

    def receive_frame(self) -> bytes:
        """The next message.

        Raises:
            ProtocolError: it was changed on the way.
        """
        length = int.from_bytes(self._take(4), "little")
        if length > _FRAME_MOST_NBYTES:
            raise ProtocolError(f"a message of {length} bytes where at most {_FRAME_MOST_NBYTES} are expected")
        data, mac = self._take(length), self._next_received()
        mac.update(data)
        self._check(mac)
        return data

    def send_bulk(self, parts: Iterator[bytes | memoryview]) -> None:
        """Send bytes, of which the other side knows how many there are. Nothing is valid there before all were sent."""
        mac = self._next_sent()
        for part in parts:
            mac.update(part)
            self._connection.sendall(part)
        self._connection.sendall(mac.digest())

    def receive_bulk(self, *targets: memoryview) -> None:
        """Fill the targets. What is in them is not to be used before this returns.

        Raises:
            ProtocolError: something was changed on the way.
        """
        mac = self._next_received()
        for target in targets:
            for begin in range(0, len(target), CHUNK_NBYTES):
                piece = target[begin : begin + CHUNK_NBYTES]
                self._fill(piece)
                mac.update(piece)
        self._check(mac)

    def _next_sent(self) -> hmac.HMAC:
        self._sent += 1
        return hmac.new(self._send_key, self._sent.to_bytes(8, "little"), "sha256")

    def _next_received(self) -> hmac.HMAC:
        self._received += 1
        return hmac.new(self._receive_key, self._received.to_bytes(8, "little"), "sha256")

    def _check(self, mac: hmac.HMAC) -> None:
        if not hmac.compare_digest(self._take(_MAC_NBYTES), mac.digest()):
            raise ProtocolError("what was received is not what was sent")

    def _take(self, nbytes: int, deadline: float | None = None) -> bytes:
        data = bytearray(nbytes)
        self._fill(memoryview(data), deadline)
        return bytes(data)

    def _fill(self, target: memoryview, deadline: float | None = None) -> None:
        got = 0
        while got < len(target):
            if deadline is not None:
                self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            more = self._connection.recv_into(target[got:])
            if not more:
                raise ConnectionError("the other side closed the connection")
            got += more


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn the errors of a connection into EDL's.

    Raises:
        TemporaryError: in place of an OSError, with `what` in front.
    """
    try:
        yield
    except OSError as exc:
        raise TemporaryError(f"{what}: {exc or type(exc).__name__}") from exc


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")
