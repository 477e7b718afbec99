"""How an agent gives replicas of its node's state to another node's agent, and takes others' replicas."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from edl.background import BackgroundLoop
from edl.collective.checkpoint.memory.replica_slots import NO_VERSION, ReplicaFolder
from edl.collective.checkpoint.memory.slots import HEADER_NBYTES, CompleteSlot, SlotHeader, SlotPair, find_slots
from edl.collective.replica.protocol import (
    CHUNK_NBYTES,
    GO_ON,
    HANDSHAKE_S,
    PRESENT,
    AuthenticatedConnection,
    ReplicaAnnouncement,
    translate_errors,
)
from edl.discovery.served.addresses import open_listener
from edl.errors import EDLError, PermanentError, TemporaryError

if TYPE_CHECKING:
    from edl.protocol.tls.peers import PeerTLS  # imported where TLS is asked for only

__all__ = ["ReplicaRefusedError", "ReplicaServer", "send_states"]


_OPERATION_S: Final = 10.0
"""How long a read or write may take: a receiver that clears memory for gigabytes takes some seconds."""


class ReplicaRefusedError(PermanentError):
    """The receiver refuses the state, and says why."""


def send_states(
    address: tuple[str, int],
    secret: bytes,
    node: str,
    states: Sequence[CompleteSlot],
    *,
    stopping: Callable[[], bool] = lambda: False,
    tls: PeerTLS | None = None,
    operation_s: float = _OPERATION_S,
) -> None:
    """Send the states of a node's workers. When this returns, the receiver has them all.

    Args:
        address: host and port of the receiver.
        secret: of the job.
        node: this node's name.
        states: of the workers, by local rank.
        stopping: is asked between any two megabytes; true to give up.
        tls: for the connection; without it the states can be read from the network.
        operation_s: how long an operation on the connection may take, in seconds.

    Raises:
        TemporaryError: the receiver does not answer, went away, or a state was overwritten meanwhile. The receiver has
            what it had before.
        ProtocolError: it is not an agent of this job.
        ReplicaRefusedError: it has no room.
    """
    where = f"the agent at {address[0]}:{address[1]}"
    with translate_errors(where), ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection(address, timeout=operation_s))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            wrapped = stack.enter_context(tls.connected(connection, address[0]))
            tls.handshake(wrapped, HANDSHAKE_S)
            stack.enter_context(tls.explained())  # TLS 1.3: the other side refuses a certificate later
            connection = wrapped
        link = AuthenticatedConnection(connection, secret, sending=True, timeout_s=operation_s)
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
    """Yield the data and the metadata. Raises before the end if they were overwritten: the receiver drops them then."""
    data = memoryview(state.map_file())[HEADER_NBYTES : HEADER_NBYTES + state.data_nbytes]
    for whole in (data, memoryview(meta)):
        for begin in range(0, len(whole), CHUNK_NBYTES):
            if stopping():
                raise TemporaryError("given up half-way")
            yield whole[begin : begin + CHUNK_NBYTES]
    if state not in find_slots(state.path.with_suffix("")):
        raise TemporaryError(f"{state.path} was overwritten while it was sent")


def _receive_answer(link: AuthenticatedConnection) -> bytes:
    answer = link.receive_frame()
    if answer not in (GO_ON, PRESENT):
        raise ReplicaRefusedError(answer.decode(errors="replace"))
    return answer


# --- The receiving side of replicas ---


_SENDER_S: Final = 10.0
"""How long the sender may leave this side waiting: it reads from memory, and another sender waits for its turn."""
_SHARE_OF_FREE: Final = 0.5
"""Of the free memory for a worker's replica: the other half is for the workers here, which may be about to save."""
_ACCEPT_RETRY_S: Final = 0.1
"""The wait after a connection that could not be accepted, where no file descriptor is left for instance."""


class ReplicaServer:
    """Listens until `close`. A single agent at a time is served; another waits for its turn.

    Args:
        folder: where the states go.
        secret: returns the job's secret; called from a thread of this object, may raise DiscoveryError.
        say: is called with every line that a person should see.
        tls: for connections, None for none.
        operation_s: how long the other side may leave this side waiting, in seconds.
        share_of_free: of the free memory, what another worker's state may take, 0 to 1.

    Attributes:
        port: where it listens, on all addresses of this host.
    """

    def __init__(
        self,
        folder: ReplicaFolder,
        secret: Callable[[], bytes],
        say: Callable[[str], None],
        *,
        tls: PeerTLS | None = None,
        operation_s: float = _SENDER_S,
        share_of_free: float = _SHARE_OF_FREE,
    ) -> None:
        self._folder = folder
        self._secret = secret
        self._say = say
        self._tls = tls
        self._operation_s = operation_s
        self._share_of_free = share_of_free
        self._listening = open_listener()
        self.port: int = self._listening.getsockname()[1]
        self._lock = threading.Lock()
        self._serving: socket.socket | None = None
        self._closing = False
        self._loop = BackgroundLoop("edl-replica-server", self._serve_next, self._interrupt)

    def close(self) -> None:
        """Stop, in the middle of a state if there is one."""
        self._loop.close()
        self._listening.close()

    def _interrupt(self) -> None:
        """Have the thread return from whatever it waits for on a socket."""
        with self._lock:
            self._closing = True
            for connection in (self._listening, self._serving):
                if connection is not None:
                    with contextlib.suppress(OSError):  # not connected any more
                        # Not that of TLS, which first forgets its keys: the thread would go on without them.
                        socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def _serve_next(self) -> float | None:
        """Serve the next agent. Returns the seconds until the next, None when this server is closed."""
        try:
            connection, address = self._listening.accept()
        except OSError:
            return None if self._closing else _ACCEPT_RETRY_S
        try:
            if self._tls is not None:
                connection = self._tls.accepted(connection)
        except OSError:  # it has hung up, as a check of health does, or no file descriptor is left
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
        link = AuthenticatedConnection(connection, self._secret(), sending=False, timeout_s=self._operation_s)
        while True:
            try:
                announcement = ReplicaAnnouncement.decode(link.receive_frame())
            except ConnectionError:
                return  # that was all
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
            return PRESENT  # taken a second time, it would replace the one before it
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
        # A node that sends no more is gone: of its states none is needed that is older than both of a node that sends.
        both = find_slots(pair.prefix)
        if len(both) == 2:
            self._folder.drop_older_than(both[1].header.version)

    def _refusal_reason(self, announcement: ReplicaAnnouncement) -> str:
        """Return why the state is not taken, "" if it is."""
        nbytes = 2 * (HEADER_NBYTES + announcement.data_nbytes + announcement.meta_nbytes)
        prefix = self._folder.slot_prefix(announcement.node, announcement.local_rank)
        there = sum(path.stat().st_size for path in self._folder.path.glob(f"{prefix.name}.[01]"))
        memory = os.statvfs(self._folder.path)
        free = memory.f_bavail * memory.f_frsize
        if nbytes - there > self._share_of_free * free:
            return f"{nbytes:,} bytes are more than {self._share_of_free:.0%} of the {free:,} that are free in memory"
        return ""


def _header_of(announcement: ReplicaAnnouncement) -> SlotHeader:
    return SlotHeader(announcement.generation, announcement.step, announcement.world, announcement.rank, sharded=True)
