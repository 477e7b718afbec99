"""Authenticated frames over TCP, by which agents that know the job's secret exchange replicas.

::

    receiver -> sender   32 random bytes
    sender -> receiver   32 random bytes, HMAC(secret, "sender" | both)
    receiver -> sender   HMAC(secret, "receiver" | both)
    then, for every part of the state
    sender -> receiver   frame: JSON that announces the part (`ReplicaAnnouncement`)
    receiver -> sender   frame: `GO_ON`, `PRESENT` if it has that part, or the reason for refusal
    sender -> receiver   the raw data and metadata, and their HMAC; not if the part is present
    receiver -> sender   frame: `GO_ON`, once it has everything

A frame consists of a length (4 bytes, little-endian), that number of bytes, and their HMAC-SHA256. The key is derived
from the secret and both sides' random bytes. Every HMAC covers the number of HMACs sent before it, so nothing can be
changed, repeated or left out. Neither side trusts anything or allocates memory until the other side has proved that it
knows the secret. The content is readable on the network unless the connection uses TLS. With TLS, the HMAC of the raw
data does not cover the data itself.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from edl.background import BackgroundLoop
from edl.collective.checkpoint.memory.replica_slots import NO_VERSION, ReplicaFolder
from edl.collective.checkpoint.memory.slots import (
    HEADER_NBYTES,
    CompleteSlot,
    SlotHeader,
    SlotPair,
    StateVersion,
    find_slots,
)
from edl.collective.job_records import Record
from edl.discovery.served.addresses import open_listener
from edl.errors import EDLError, PermanentError, ProtocolError, TemporaryError

if TYPE_CHECKING:
    from edl.protocol.tls import PeerTLS  # imported only if TLS is used

CHUNK_NBYTES: Final = 1 << 20  # sent at once; a tenth would cost Python's time, ten times as much fit no core's cache
GO_ON: Final = b""
PRESENT: Final = b"present"
_NONCE_NBYTES: Final = 32  # 256 random bits: no nonce occurs twice
_MAC_NBYTES: Final = 32  # of SHA-256
_FRAME_MOST_NBYTES: Final = 1 << 16  # an announcement has about 300 bytes; a peer cannot make us allocate more
_META_MOST_NBYTES: Final = 1 << 30  # about 150 bytes per tensor; a peer cannot make us allocate more
HANDSHAKE_S: Final = 5.0  # to prove knowledge of the secret; a stranger can hold a connection that long
_NODE: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")


@dataclass(frozen=True)
class ReplicaAnnouncement(Record):
    """Announces the next transfer: the state of a worker."""

    node: str  # name of the sending node
    local_rank: int  # local rank of the worker on that node
    generation: int  # header of the worker's slot
    step: int
    world: int
    rank: int
    data_nbytes: int  # how many bytes of tensors and of metadata follow
    meta_nbytes: int
    before: StateVersion  # the other state that the sender holds; newer ones that the receiver has were abandoned

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> ReplicaAnnouncement:
        generation, step, world = map(int, values["before"])
        made = super().from_values({**values, "before": (generation, step, world)})
        numbers = (made.local_rank, made.generation, made.step, made.world, made.rank, made.data_nbytes)
        possible = (
            _NODE.fullmatch(made.node) is not None
            and all(0 <= number < 1 << 62 for number in numbers)
            and made.rank < made.world
            and 0 <= made.meta_nbytes <= _META_MOST_NBYTES
        )
        if not possible:
            raise ValueError("impossible numbers, or an invalid node name")
        return made


class AuthenticatedConnection:
    """A connection between two agents that know the job's secret. It is unusable after an error."""

    def __init__(self, connection: socket.socket, secret: bytes, *, sending: bool, timeout_s: float) -> None:
        self._connection = connection
        self._private = isinstance(connection, ssl.SSLSocket)
        self._sent = 0
        self._received = 0
        deadline = time.monotonic() + HANDSHAKE_S
        mine = secrets.token_bytes(_NONCE_NBYTES)
        if sending:
            theirs = self._receive_exactly(_NONCE_NBYTES, deadline)
            both = theirs + mine
            connection.sendall(mine + _mac(secret, b"sender", both))
            proof = self._receive_exactly(_MAC_NBYTES, deadline)
        else:
            connection.settimeout(HANDSHAKE_S)
            connection.sendall(mine)
            both = mine + self._receive_exactly(_NONCE_NBYTES, deadline)
            proof = self._receive_exactly(_MAC_NBYTES, deadline)
        if not hmac.compare_digest(proof, _mac(secret, b"receiver" if sending else b"sender", both)):
            raise ProtocolError("the other side does not know the secret of this job")
        if not sending:
            connection.sendall(_mac(secret, b"receiver", both))
        self._send_key = _mac(secret, b"to receiver" if sending else b"to sender", both)
        self._receive_key = _mac(secret, b"to sender" if sending else b"to receiver", both)
        connection.settimeout(timeout_s)

    def send_frame(self, data: bytes) -> None:
        """Send a message of at most 64 KiB."""
        mac = self._next_sent()
        mac.update(data)
        self._connection.sendall(len(data).to_bytes(4, "little") + data + mac.digest())

    def receive_frame(self) -> bytes:
        length = int.from_bytes(self._receive_exactly(4), "little")
        if length > _FRAME_MOST_NBYTES:
            raise ProtocolError(f"a message of {length} bytes, but at most {_FRAME_MOST_NBYTES} are expected")
        data, mac = self._receive_exactly(length), self._next_received()
        mac.update(data)
        self._check_tag(mac.digest())
        return data

    def send_bulk(self, parts: Iterator[bytes | memoryview]) -> None:
        """Send pieces of bytes that do not change during the call. The receiver trusts them once all have arrived."""
        mac = self._next_sent()
        with self._hashing(mac) as add:
            for part in parts:
                add(part)
                self._connection.sendall(part)
        self._connection.sendall(mac.digest())

    def receive_bulk(self, *targets: memoryview) -> None:
        """Fill memory with the bytes that arrive. Do not use the bytes before this method returns."""
        mac = self._next_received()
        with self._hashing(mac) as add:
            for target in targets:
                for begin in range(0, len(target), CHUNK_NBYTES):
                    piece = target[begin : begin + CHUNK_NBYTES]
                    self._receive_into(piece)
                    add(piece)
        self._check_tag(mac.digest())

    @contextlib.contextmanager
    def _hashing(self, mac: hmac.HMAC) -> Iterator[Callable[[bytes | memoryview], object]]:
        """Yield a function that adds a piece to `mac` in a thread. When the block ends, all pieces have been added."""
        if self._private:
            yield lambda piece: None
            return
        with ThreadPoolExecutor(1, thread_name_prefix="edl-hash") as thread:
            yield lambda piece: thread.submit(mac.update, piece)  # releases the GIL

    def _next_sent(self) -> hmac.HMAC:
        self._sent += 1
        return hmac.new(self._send_key, self._sent.to_bytes(8, "little"), "sha256")

    def _next_received(self) -> hmac.HMAC:
        self._received += 1
        return hmac.new(self._receive_key, self._received.to_bytes(8, "little"), "sha256")

    def _check_tag(self, tag: bytes) -> None:
        if not hmac.compare_digest(self._receive_exactly(_MAC_NBYTES), tag):
            raise ProtocolError("the received data is not what was sent")

    def _receive_exactly(self, nbytes: int, deadline: float | None = None) -> bytes:
        data = bytearray(nbytes)
        self._receive_into(memoryview(data), deadline)
        return bytes(data)

    def _receive_into(self, target: memoryview, deadline: float | None = None) -> None:
        got = 0
        while got < len(target):
            if deadline is not None:
                self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            more = self._connection.recv_into(target[got:])
            if not more:
                raise ConnectionError("the other side closed the connection")
            got += more


@contextlib.contextmanager
def translate_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise TemporaryError(f"{what}: {exc or type(exc).__name__}") from exc


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


# --- Sending a node's states to another agent ---


_OPERATION_S: Final = 10.0  # for a read or write: a receiver that clears memory for gigabytes takes some seconds


class ReplicaRefusedError(PermanentError):
    """The receiver refused the state; the message says why."""


def send_states(
    address: tuple[str, int],
    secret: bytes,
    node: str,
    states: Sequence[CompleteSlot],
    *,
    stopping: Callable[[], bool] = lambda: False,
    tls: PeerTLS | None = None,
) -> None:
    """Send the states of a node's workers, in local rank order. When this returns, the receiver has them all.

    Raises:
        TemporaryError: The receiver cannot be reached, `stopping` returned True, or a state was overwritten.
        ProtocolError: The receiver is not an agent of this job.
        ReplicaRefusedError: The receiver has no room.
    """
    where = f"the agent at {address[0]}:{address[1]}"
    with translate_errors(where), ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection(address, timeout=_OPERATION_S))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            wrapped = stack.enter_context(tls.wrap(connection, address[0]))
            tls.handshake(wrapped, HANDSHAKE_S)
            stack.enter_context(tls.explained())  # TLS 1.3: the other side refuses a certificate later
            connection = wrapped
        link = AuthenticatedConnection(connection, secret, sending=True, timeout_s=_OPERATION_S)
        for local_rank, state in enumerate(states):
            _send_state(link, node, local_rank, state, stopping)


def _send_state(
    link: AuthenticatedConnection, node: str, local_rank: int, state: CompleteSlot, stopping: Callable[[], bool]
) -> None:
    meta = state.read_metadata()
    if meta is None:
        raise TemporaryError(f"{state.path} was overwritten before it was sent")
    header = state.header
    others = [slot.header.version for slot in find_slots(state.path.with_suffix("")) if slot != state]
    announcement = ReplicaAnnouncement(
        node,
        local_rank,
        *(header.generation, header.step, header.world, header.rank),
        *(state.data_nbytes, len(meta)),
        before=others[0] if others else NO_VERSION,
    )
    link.send_frame(announcement.encode())
    if _receive_answer(link) == PRESENT:
        return
    link.send_bulk(_state_contents(state, meta, stopping))
    _receive_answer(link)


def _state_contents(state: CompleteSlot, meta: bytes, stopping: Callable[[], bool]) -> Iterator[bytes | memoryview]:
    """Yield the data, then the metadata. Raises an error before the end if the slot was overwritten."""
    data = memoryview(state.map_file())[HEADER_NBYTES : HEADER_NBYTES + state.data_nbytes]
    for whole in (data, memoryview(meta)):
        for begin in range(0, len(whole), CHUNK_NBYTES):
            if stopping():
                raise TemporaryError("stopped halfway")
            yield whole[begin : begin + CHUNK_NBYTES]
    if state not in find_slots(state.path.with_suffix("")):
        raise TemporaryError(f"{state.path} was overwritten while it was being sent")


def _receive_answer(link: AuthenticatedConnection) -> bytes:
    answer = link.receive_frame()
    if answer not in (GO_ON, PRESENT):
        raise ReplicaRefusedError(answer.decode(errors="replace"))
    return answer


_SENDER_S: Final = 10.0  # how long the sender may keep this side waiting, while another waits for its turn
_SHARE_OF_FREE: Final = 0.5  # of the free memory that a replica may take; the rest is for this node's workers
_ACCEPT_RETRY_S: Final = 0.1  # after a connection could not be accepted: no file descriptor is left


class ReplicaServer:
    """Receives states until `close`, from one agent at a time, at `port` of all of the host's addresses."""

    def __init__(
        self,
        folder: ReplicaFolder,
        secret: Callable[[], bytes],
        say: Callable[[str], None],
        *,
        tls: PeerTLS | None = None,
    ) -> None:
        self._folder = folder
        self._secret = secret
        self._say = say
        self._tls = tls
        self._listening = open_listener()
        self.port: int = self._listening.getsockname()[1]
        self._lock = threading.Lock()
        self._serving: socket.socket | None = None
        self._closing = False
        self._loop = BackgroundLoop("edl-replica-server", self._serve_next, self._interrupt)

    def close(self) -> None:
        self._loop.close()
        self._listening.close()

    def _interrupt(self) -> None:
        """Make the thread return from whatever it waits for on a socket."""
        with self._lock:
            self._closing = True
            for connection in (self._listening, self._serving):
                if connection is not None:
                    with contextlib.suppress(OSError):  # no longer connected
                        # Not TLS's own shutdown, which first forgets its keys: the thread would continue in plain text.
                        socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def _serve_next(self) -> float | None:
        """Serve the next agent. Returns the seconds until the next call, or None if this server is closed."""
        try:
            connection, address = self._listening.accept()
        except OSError:
            return None if self._closing else _ACCEPT_RETRY_S
        try:
            if self._tls is not None:
                connection = self._tls.wrap(connection)
        except OSError:  # it hung up, as a health check does, or no file descriptor is left
            connection.close()
            return 0.0
        with connection:
            with self._lock:
                if self._closing:
                    return None
                self._serving = connection
            try:
                if self._tls is not None and isinstance(connection, ssl.SSLSocket):
                    self._tls.handshake(connection, HANDSHAKE_S)
                self._serve_agent(connection)
            except (OSError, EDLError) as exc:
                if not self._closing:
                    self._say(f"a replica from {address[0]} did not arrive: {exc or type(exc).__name__}")
            finally:
                with self._lock:
                    self._serving = None
        return 0.0

    def _serve_agent(self, connection: socket.socket) -> None:
        link = AuthenticatedConnection(connection, self._secret(), sending=False, timeout_s=_SENDER_S)
        while True:
            try:
                announcement = ReplicaAnnouncement.decode(link.receive_frame())
            except ConnectionError:
                return  # the sender is done
            pair = SlotPair(self._folder.slot_prefix(announcement.node, announcement.local_rank))
            try:
                answer = self._answer_announcement(announcement, pair)
                link.send_frame(answer)
                if answer == GO_ON:
                    self._receive_state(link, announcement, pair)
                    link.send_frame(GO_ON)
            finally:
                pair.close()

    def _answer_announcement(self, announcement: ReplicaAnnouncement, pair: SlotPair) -> bytes:
        if any(slot.header == _header_of(announcement) for slot in pair.find_complete()):
            return PRESENT  # receiving it again would replace the other state
        return self._refusal_reason(announcement).encode()

    def _receive_state(self, link: AuthenticatedConnection, announcement: ReplicaAnnouncement, pair: SlotPair) -> None:
        for found in pair.find_complete()[1:]:
            if found.header.version == announcement.before:
                pair.keep_only_slot(found)
        _, memory = pair.begin_write(announcement.data_nbytes, announcement.meta_nbytes)
        meta = bytearray(announcement.meta_nbytes)
        with memoryview(memory) as whole, whole[HEADER_NBYTES : HEADER_NBYTES + announcement.data_nbytes] as data:
            link.receive_bulk(data, memoryview(meta))
        pair.commit_write(_header_of(announcement), announcement.data_nbytes, bytes(meta))
        # A node that no longer sends is gone. Its states are not needed once a sending node has two newer ones.
        both = find_slots(pair.prefix)
        if len(both) == 2:
            self._folder.drop_older_than(both[1].header.version)

    def _refusal_reason(self, announcement: ReplicaAnnouncement) -> str:
        nbytes = 2 * (HEADER_NBYTES + announcement.data_nbytes + announcement.meta_nbytes)
        prefix = self._folder.slot_prefix(announcement.node, announcement.local_rank)
        there = sum(path.stat().st_size for path in self._folder.path.glob(f"{prefix.name}.[01]"))
        memory = os.statvfs(self._folder.path)
        free = memory.f_bavail * memory.f_frsize
        if nbytes - there > _SHARE_OF_FREE * free:
            return f"{nbytes:,} bytes are more than {_SHARE_OF_FREE:.0%} of the {free:,} bytes of free memory"
        return ""


def _header_of(announcement: ReplicaAnnouncement) -> SlotHeader:
    return SlotHeader(announcement.generation, announcement.step, announcement.world, announcement.rank, sharded=True)
