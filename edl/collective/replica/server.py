"""The receiving side of replicas: takes the states that another agent sends into this host's memory, whole or not."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from edl.collective.checkpoint.memory.replica_slots import ReplicaFolder
from edl.collective.checkpoint.memory.slots import HEADER_NBYTES, SlotHeader, SlotPair, find_slots
from edl.collective.replica.protocol import GO_ON, HANDSHAKE_S, PRESENT, AuthenticatedConnection, ReplicaAnnouncement
from edl.discovery.served.listening import open_listener
from edl.errors import EDLError

if TYPE_CHECKING:
    from edl.protocol.tls.peers import PeerTLS  # imported where TLS is asked for only

__all__ = ["ReplicaServer"]

_OPERATION_S: Final = 10.0
_SHARE_OF_FREE: Final = 0.5


class ReplicaServer:
    """Listens until `close`. One agent at a time is served; another waits for its turn.

    Args:
        folder: where the states go.
        secret: gives the job's secret; called from a thread of this object, may raise DiscoveryError.
        say: called with each line that a person should see.
        tls: for connections, None for none.
        operation_s: how long the other side may leave this one waiting.
        share_of_free: of the free memory, what one more worker's state may take; the rest is for the workers here.

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
        operation_s: float = _OPERATION_S,
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
        self._thread = threading.Thread(target=self._run, name="edl-replica-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, in the middle of a state if there is one."""
        with self._lock:
            self._closing = True
            for one in (self._listening, self._serving):
                if one is not None:
                    with contextlib.suppress(OSError):  # not connected any more
                        # Not that of TLS, which first forgets its keys: the thread would go on without them.
                        socket.socket.shutdown(one, socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()

    def _run(self) -> None:
        while True:
            try:
                connection, address = self._listening.accept()
            except OSError:
                if self._closing:
                    return
                continue
            try:
                if self._tls is not None:
                    connection = self._tls.accepted(connection)
            except OSError:  # it has hung up, as a check of health does, or no file descriptor is left
                connection.close()
                continue
            with connection:
                with self._lock:
                    if self._closing:
                        return
                    self._serving = connection
                try:
                    if self._tls is not None and isinstance(connection, ssl.SSLSocket):
                        self._tls.handshake(connection, HANDSHAKE_S)
                    self._serve(connection)
                except (OSError, EDLError) as exc:
                    if not self._closing:
                        self._say(f"a replica from {address[0]} did not arrive: {exc or type(exc).__name__}")
                finally:
                    with self._lock:
                        self._serving = None

    def _serve(self, connection: socket.socket) -> None:
        link = AuthenticatedConnection(connection, self._secret(), sending=False, timeout_s=self._operation_s)
        while True:
            try:
                told = ReplicaAnnouncement.decode(link.receive_frame())
            except ConnectionError:
                return  # that was all
            pair = SlotPair(self._folder.slot_prefix(told.node, told.local_rank))
            try:
                answer = self._answer(told, pair)
                link.send_frame(answer)
                if answer == GO_ON:
                    self._receive(link, told, pair)
                    link.send_frame(GO_ON)
            finally:
                pair.close()

    def _answer(self, told: ReplicaAnnouncement, pair: SlotPair) -> bytes:
        if any(one.header == _label(told) for one in pair.find_complete()):
            return PRESENT  # taken a second time, it would replace the one before it
        return self._no_room(told).encode()

    def _receive(self, link: AuthenticatedConnection, told: ReplicaAnnouncement, pair: SlotPair) -> None:
        for found in pair.find_complete()[1:]:
            if found.header.version == told.before:
                pair.keep_only_slot(found)
        _, memory = pair.begin_write(told.data_nbytes, told.meta_nbytes)
        meta = bytearray(told.meta_nbytes)
        with memoryview(memory) as whole, whole[HEADER_NBYTES : HEADER_NBYTES + told.data_nbytes] as data:
            link.receive_bulk(data, memoryview(meta))
        pair.commit_write(_label(told), told.data_nbytes, bytes(meta))
        # Of whoever is heard of no more nothing is needed that is older than both states of whoever is.
        both = find_slots(pair.prefix)
        if len(both) == 2:
            self._folder.drop_older_than(both[1].header.version)

    def _no_room(self, told: ReplicaAnnouncement) -> str:
        """Why the state is not taken, empty if it is."""
        nbytes = 2 * (HEADER_NBYTES + told.data_nbytes + told.meta_nbytes)
        prefix = self._folder.slot_prefix(told.node, told.local_rank)
        there = sum(path.stat().st_size for path in self._folder.path.glob(f"{prefix.name}.[01]"))
        memory = os.statvfs(self._folder.path)
        free = memory.f_bavail * memory.f_frsize
        if nbytes - there > self._share_of_free * free:
            return f"{nbytes:,} bytes are more than {self._share_of_free:.0%} of the {free:,} that are free in memory"
        return ""


def _label(told: ReplicaAnnouncement) -> SlotHeader:
    return SlotHeader(told.generation, told.step, told.world, told.rank, sharded=True)
