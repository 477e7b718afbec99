"""Records of a job in the Store, which nodes write for other nodes and for `edl status`.

`Node` is an agent's record of itself. The record of the job (`World`) says which nodes train together, in which order,
and in which generation.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any, Final, TypeVar

from edl.discovery.store import Store
from edl.errors import DiscoveryError, ProtocolError

GAVE_UP: Final = "gave up"  # beginning of the event of a node that leaves because other nodes or the store are missing


def prefix(job: str) -> str:
    return f"jobs/{job}/"


def create_once(store: Store, key: str, value: bytes) -> bytes:
    """Return the value at a key in the Store. If there is none, write `value` there first."""
    entry = store.get(key)
    if entry is None:
        store.compare_and_set(key, value, None)
        entry = store.get(key)
    if entry is None:
        raise DiscoveryError(f"the store forgot {key} as soon as it was written")
    return entry.value


_R = TypeVar("_R", bound="Record")
_TYPES: Final = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "float | None": (float, int, type(None)),
    "dict[str, str]": (dict,),
}


@dataclass(frozen=True)
class Record:
    """A value that is stored or sent as a JSON object. The types of its fields are checked when the object is read."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls: type[_R], data: bytes) -> _R:
        """Read a record that `encode` wrote.

        Raises:
            ProtocolError: The bytes are not such a record.
        """
        try:
            return cls.from_values(json.loads(data))
        except (ValueError, TypeError, KeyError, RecursionError) as exc:
            raise ProtocolError(f"not a record of type {cls.__name__}: {data[:100]!r} ({exc!r})") from exc

    @classmethod
    def from_values(cls: type[_R], values: dict[str, Any]) -> _R:
        """Make a record from JSON values. Ignores fields that a later version of EDL added."""
        known = {field.name: str(field.type) for field in fields(cls) if field.name in dict(values)}
        wrong = [name for name, kind in known.items() if kind in _TYPES and type(values[name]) not in _TYPES[kind]]
        if wrong:
            raise TypeError(f"{', '.join(wrong)} of the wrong type")
        return cls(**{name: values[name] for name in known})


class JobState(str, Enum):
    """The states of a job."""

    FORMING = "forming"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Node(Record):
    """An agent's record of itself, which disappears with its lease."""

    id: str  # unique name of the agent's process
    addr: str  # address at which the workers of other nodes reach this node
    port: int  # port of a `torch.distributed.TCPStore` that the agent holds ready and that no generation has used yet
    workers: int  # number of workers that the node runs
    replica_port: int = 0  # port at which its agent takes replicas of other nodes' states; 0 if it takes none
    tether_port: int = 0  # port to which peers connect, to learn at once when its agent dies; 0 for none
    slot_nbytes: int = 0  # size of a worker's slot of shared memory, for nodes that join; 0 while there is none
    leaving: bool = False  # whether it wants to leave and must not be a member of the next world
    paused: int = -1  # the generation in which all of its workers paused; -1 for none
    finished: int = -1  # the generation in which all of its workers ended with exit code 0; -1 for none
    busy: int = -1  # generation in which a worker is busy between two steps, so that ranks and nodes wait; -1 for none


@dataclass(frozen=True)
class Member(Record):
    """A node in a world. Its workers have the ranks from `first_rank` on. All ranks meet at the first node's `port`."""

    id: str
    addr: str
    port: int
    local_world_size: int
    first_rank: int
    replica_port: int = 0
    tether_port: int = 0

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.local_world_size)


@dataclass(frozen=True)
class World(Record):
    """The record of a job."""

    generation: int = -1  # number of the world: each new world adds 1; the first that runs is 0
    state: JobState = JobState.FORMING
    nodes: tuple[Member, ...] = ()  # the members; a member's position is its node's rank (torchrun's GROUP_RANK)
    message: str = ""  # why this world was made; for a job that failed, the traceback
    pause_at: int | None = None  # the step after which all workers pause; None if no pause is requested
    forgiven: int = 0  # how many errors of the script itself the job has survived
    cause: str = ""  # for a job that failed, the cause: a value of `edl.collective.agent.health.failures.ExitCause`
    failed_rank: int = -1  # for a job that failed, the rank that failed first; -1 if none did

    @property
    def size(self) -> int:
        return sum(member.local_world_size for member in self.nodes)

    @property
    def ended(self) -> bool:
        return self.state in (JobState.DONE, JobState.FAILED)

    def position(self, node: str) -> int | None:
        """Return the rank of a node, or None if it is not a member."""
        return next((place for place, member in enumerate(self.nodes) if member.id == node), None)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> World:
        members = tuple(Member.from_values(member) for member in values["nodes"])
        return super().from_values({**values, "state": JobState(values["state"]), "nodes": members})


@dataclass(frozen=True)
class Exclusion(Record):
    """A host that a job excludes because one of its GPUs failed. The record has no lease."""

    node: str  # the agent that found the fault
    reason: str  # what failed, in one line
    clear: bool = True  # whether the GPU is certainly at fault, rather than possibly a kernel of the script
    step: int = -1  # the last step that the node's workers finished; -1 if they report none
    at_s: float = 0.0  # wall clock, in seconds since 1970
