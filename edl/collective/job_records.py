"""Records of a job in the Store: what its nodes write for other nodes and for `edl status`.

Every node's agent keeps a record of itself under a lease (`Node`). The record of the job (`World`) says which nodes
train together, in which order, and under which generation. `agent.rendezvous` decides what a record should become, and
`agent.node_records` reads and writes the records.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any, Final

from edl.errors import ProtocolError

GAVE_UP: Final = "gave up"
"""Beginning of the event of a node that leaves because too few others came, or the store stayed away."""


def prefix(job: str) -> str:
    """Return the prefix of all keys of a job in the Store."""
    return f"jobs/{job}/"


def exclusions_prefix(job: str) -> str:
    """Return the prefix of the keys of hosts that a job excludes."""
    return f"{prefix(job)}left-out/"


class JobState(str, Enum):
    """The states of a job."""

    FORMING = "forming"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Node:
    """An agent's record of itself, which disappears with its lease."""

    id: str  # unique name of the agent's process
    addr: str  # address at which the workers of other nodes reach this node
    port: int  # port of a `torch.distributed.TCPStore` that the agent holds ready and that no generation has used yet
    workers: int  # number of workers that the node runs
    replica_port: int = 0  # port at which its agent takes replicas of other nodes' states; 0 if it takes none
    # Port to which peers connect, to learn at once when its agent's process dies; 0 if there is none
    tether_port: int = 0
    # Size of a worker's slot of shared memory in bytes, for nodes that join; 0 while there is none
    slot_nbytes: int = 0
    leaving: bool = False  # whether it wants to leave and must not be a member of the next world
    paused: int = -1  # the generation in which all of its workers paused; -1 for none
    finished: int = -1  # the generation in which all of its workers ended with exit code 0; -1 for none
    # The generation in which one of its workers does something long between two steps; -1 for none. A rank that waits
    # for it does not count as hung, and a node that wants to join waits until it is done.
    busy: int = -1

    def encode(self) -> bytes:
        """Return the record as JSON, for the Store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Node:
        """Read a record that `encode` wrote, and ignore fields that a later version of EDL added."""
        try:
            return cls(**_known(cls, json.loads(data)))
        except (ValueError, TypeError) as exc:
            raise ProtocolError(f"not a node's record: {data[:100]!r} ({exc})") from exc


@dataclass(frozen=True)
class Member:
    """A node in a world; its workers have the ranks from `first_rank` on. All ranks meet at the first node's `port`.

    Its agent takes replicas of other nodes' states at `replica_port`, and peers connect to `tether_port`; 0 means
    neither.
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
    """The record of a job."""

    generation: int = -1  # number of the world, which grows by 1 with each new one; the first that runs is 0
    state: JobState = JobState.FORMING
    nodes: tuple[Member, ...] = ()  # the members; a member's position is its node's rank (torchrun's GROUP_RANK)
    message: str = ""  # why this world was made; for a job that failed, the traceback
    pause_at: int | None = None  # the step after which all workers pause; None if no pause is requested
    forgiven: int = 0  # how many errors of the script itself the job has survived
    cause: str = ""  # for a job that failed, the cause: a value of `edl.collective.agent.health.failures.ExitCause`
    failed_rank: int = -1  # for a job that failed, the rank that failed first; -1 if none did

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(member.local_world_size for member in self.nodes)

    @property
    def ended(self) -> bool:
        """Whether the job is done or has failed."""
        return self.state in (JobState.DONE, JobState.FAILED)

    def position(self, node: str) -> int | None:
        """Return the rank of a node, or None if it is not a member."""
        return next((place for place, member in enumerate(self.nodes) if member.id == node), None)

    def encode(self) -> bytes:
        """Return the record as JSON, for the Store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> World:
        """Read a record that `encode` wrote, and ignore fields that a later version of EDL added."""
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
    """A host that a job excludes because one of its GPUs failed. The record has no lease."""

    node: str  # the agent that found the fault
    reason: str  # what failed, in one line
    clear: bool = True  # whether the GPU is certainly at fault, rather than possibly a kernel of the script
    step: int = -1  # the last step that the node's workers finished; -1 if they report none
    at_s: float = 0.0  # wall clock, in seconds since 1970

    def encode(self) -> bytes:
        """Return the record as JSON, for the Store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Exclusion:
        """Read a record that `encode` wrote, and ignore fields that a later version of EDL added."""
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
    """Raise TypeError if an attribute has the wrong type.

    Only those that programs other than agents read are checked.
    """
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
