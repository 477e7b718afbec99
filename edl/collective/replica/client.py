"""The sending side of replicas: what a node's workers have kept goes to another node's agent."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from edl.collective.checkpoint.memory.replica_slots import NO_VERSION
from edl.collective.checkpoint.memory.slots import HEADER_NBYTES, CompleteSlot, find_slots
from edl.collective.replica.protocol import (
    CHUNK_NBYTES,
    GO_ON,
    HANDSHAKE_S,
    PRESENT,
    AuthenticatedConnection,
    ReplicaAnnouncement,
    translate_errors,
)
from edl.errors import PermanentError, TemporaryError

if TYPE_CHECKING:
    from edl.protocol.tls.peers import PeerTLS  # imported where TLS is asked for only

__all__ = ["ReplicaRefusedError", "send_states"]

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
