"""Records of a job in the Store: what its nodes write for other nodes, and for `edl status`.

Every node's agent keeps a record of itself under a lease (`Node`); the record of the job (`World`) says which nodes
train together, in which order, and under which generation. Not here: what a record should become
(`agent.rendezvous`), and how it is read and written (`agent.node_records`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

from edl.errors import ProtocolError

__all__ = ["Exclusion", "JobState", "Member", "Node", "World", "exclusions_prefix", "prefix"]


def prefix(job: str) -> str:
    """Return the prefix of all keys of a job in the Store."""
    return f"jobs/{job}/"


def exclusions_prefix(job: str) -> str:
    """Return the prefix of the keys of hosts that a job leaves out."""
    return f"{prefix(job)}left-out/"


class JobState(str, Enum):
    """Where a job is in its life."""

    FORMING = "forming"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Node:
    """An agent's record of itself, which is gone when its lease is.

    Attributes:
        id: unique for an agent's process.
        addr: where the workers of other nodes reach this node.
        port: of a `torch.distributed.TCPStore` that the agent holds ready and that no generation has used yet.
        workers: the number of workers that it runs.
        replica_port: where its agent takes replicas of other nodes' states, 0 if it takes none.
        tether_port: where peers connect, to learn at once that its agent's process is gone; 0 if nowhere.
        slot_nbytes: bytes of a worker's slot of shared memory, for nodes that join; 0 while there is none.
        leaving: it wants to go, and must not be a member of the next world.
        paused: the generation in which all of its workers paused, -1 for none.
        finished: the generation in which all of its workers ended well, -1 for none.
        busy: the generation in which a worker of it does something long between two steps, -1 for none: a rank that
            waits for it does not hang, and a node that wants to join waits until it is done.
    """

    id: str
    addr: str
    port: int
    workers: int
    replica_port: int = 0
    tether_port: int = 0
    slot_nbytes: int = 0
    leaving: bool = False
    paused: int = -1
    finished: int = -1
    busy: int = -1

    def encode(self) -> bytes:
        """Return the record as JSON, for the Store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Node:
        """Read a record that `encode` wrote; what a later version of EDL added is left out.

        Raises:
            ProtocolError: the bytes are something else.
        """
        try:
            return cls(**_known(cls, json.loads(data)))
        except (ValueError, TypeError) as exc:
            raise ProtocolError(f"not a node's record: {data[:100]!r} ({exc})") from exc


@dataclass(frozen=True)
class Member:
    """A node in a world; its workers have the ranks from `first_rank` on. All ranks meet at the first node's `port`.

    Its agent takes replicas of other nodes' states at `replica_port`, and peers connect at `tether_port`; 0 for none.
    """

    id: str
    addr: str
    port: int
    local_world_size: int
    first_rank: int
    replica_port: int = 0
    tether_port: int = 0

    @property
    def ranks(self) -> range:
        """The ranks of its workers."""
        return range(self.first_rank, self.first_rank + self.local_world_size)


@dataclass(frozen=True)
class World:
    """The record of a job.

    Attributes:
        generation: grows by 1 with a new world; 0 is the first that runs.
        nodes: the members; the position is the node's rank (torchrun's GROUP_RANK).
        message: why this world came to be, in words; of a job that failed, the traceback.
        pause_at: the step after which all workers shall pause, None while no node wants that.
        forgiven: after how many errors of the script's own the job went on.
        cause: of a job that failed, why: a value of `edl.collective.agent.health.failures.ExitCause`.
        failed_rank: of a job that failed, the rank that failed first; -1 if none did.
    """

    generation: int = -1
    state: JobState = JobState.FORMING
    nodes: tuple[Member, ...] = ()
    message: str = ""
    pause_at: int | None = None
    forgiven: int = 0
    cause: str = ""
    failed_rank: int = -1

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(member.local_world_size for member in self.nodes)

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in (JobState.DONE, JobState.FAILED)

    def position(self, node: str) -> int | None:
        """Return the rank of a node, None if it is not a member."""
        return next((place for place, member in enumerate(self.nodes) if member.id == node), None)

    def encode(self) -> bytes:
        """Return the record as JSON, for the Store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> World:
        """Read a record that `encode` wrote; what a later version of EDL added is left out.

        Raises:
            ProtocolError: the bytes are something else.
        """
        try:
            values = _known(cls, json.loads(data))
            values["state"] = JobState(values["state"])
            values["nodes"] = tuple(Member(**_known(Member, member)) for member in values["nodes"])
            world = cls(**values)
            _check_types(world, ("message", "cause"), ("generation", "forgiven", "failed_rank"))
            for member in world.nodes:
                _check_types(member, ("id", "addr"), ("port", "local_world_size", "first_rank"))
            return world
        except (ValueError, TypeError, KeyError) as exc:
            raise ProtocolError(f"not a world's record: {data[:100]!r} ({exc})") from exc


@dataclass(frozen=True)
class Exclusion:
    """A host that a job leaves out, because a GPU of it failed. The record has no lease.

    Attributes:
        node: the agent that found it out.
        reason: what failed, in a line.
        clear: it is the GPU for certain, and not perhaps a kernel of the script.
        step: the last step that the node's workers had finished, -1 if they report none.
        at_s: wall clock, seconds since 1970.
    """

    node: str
    reason: str
    clear: bool = True
    step: int = -1
    at_s: float = 0.0

    def encode(self) -> bytes:
        """Return the record as JSON, for the Store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Exclusion:
        """Read a record that `encode` wrote; what a later version of EDL added is left out.

        Raises:
            ProtocolError: the bytes are something else.
        """
        try:
            values = _known(cls, json.loads(data))
            exclusion = cls(**values)
            wrong = [name for name in ("node", "reason") if not isinstance(values[name], str)]
            if wrong or not isinstance(exclusion.step, int) or not isinstance(exclusion.at_s, (int, float)):
                raise TypeError(f"{wrong or 'step or at_s'} of another type")
        except (ValueError, TypeError, KeyError) as exc:
            raise ProtocolError(f"not the record of a host that is left out: {data[:100]!r} ({exc})") from exc
        return exclusion


def _check_types(record: object, texts: tuple[str, ...], numbers: tuple[str, ...]) -> None:
    """Raise TypeError where an attribute that is read by others than agents is of another type."""
    wrong = [name for name in texts if not isinstance(getattr(record, name), str)]
    wrong += [name for name in numbers if type(getattr(record, name)) is not int]
    if wrong:
        raise TypeError(f"{', '.join(wrong)} of another type")


def _known(cls: type, values: Any) -> dict[str, Any]:
    """Return the attributes of a dataclass among `values`: a node of a later version may join, and break nothing."""
    if not isinstance(values, dict):
        raise TypeError("no JSON object")
    names = {attribute.name for attribute in fields(cls)}
    return {name: value for name, value in values.items() if name in names}
