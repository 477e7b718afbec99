"""A job's ledger in the Store, written by its agents and read by `edl status` and `edl report`.

::

    jobs/JOB/world                  which nodes train together (edl.collective.job_records), written by all agents
    jobs/JOB/ledger/NODE/BEGAN      a life of a node's agent: all of its time, rewritten about once a second
    jobs/JOB/left-out/HOST          a host that the job leaves out (edl.collective.job_records)
    jobs/JOB/events/NODE/BEGAN      what happened to it or was seen by it lately

None of it has a lease: it stays when the agents are gone, until `delete_ledgers`. BEGAN is when that life began, so
that an agent which comes back writes beside what it wrote before.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias
from urllib.parse import quote

from edl.collective.goodput.codec import Event, decode_events, decode_record, encode_events, encode_record
from edl.collective.goodput.node import Ledger, NodeRecord
from edl.collective.job_records import Exclusion, World, prefix
from edl.discovery.store import Store
from edl.errors import ProtocolError, SettingsError

__all__ = [
    "JobPart",
    "JobRecord",
    "LedgerWriter",
    "decode_part",
    "delete_ledgers",
    "join_parts",
    "last_step_before",
    "list_jobs",
    "read_job",
]

MAX_EVENTS: Final = 300  # of a life of an agent: as JSON below 120 KB in ASCII, written again with every event

JobPart: TypeAlias = "World | NodeRecord | tuple[Event, ...] | Exclusion | None"
"""What an entry of a job holds."""


class LedgerWriter:
    """Writes an agent's ledger and events. All methods are single puts and raise what `Store.put` does.

    What could not be written is in the next put, so a caller may ignore a `DiscoveryError`.

    Args:
        store: stays the caller's to close.
        job: its name.
        ledger: of the agent's node.
    """

    def __init__(self, store: Store, job: str, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger
        life = f"{quote(ledger.node, safe='')}/{ledger.record().began_us}"
        self._ledger_key = f"{_prefix(job)}ledger/{life}"
        self._events_key = f"{_prefix(job)}events/{life}"
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)

    def write_record(self, record: NodeRecord | None = None) -> None:
        """Put the ledger as it was last observed: the agent's sign of life.

        Args:
            record: of the ledger, if another thread changes that meanwhile.
        """
        self._store.put(self._ledger_key, encode_record(record or self._ledger.record()))

    def record_event(self, kind: str, text: str, generation: int = -1, node: str = "") -> None:
        """Put an event that happens now.

        Args:
            kind: see `Event`.
            text: what happened, in a few words.
            generation: of the world in which it happened, -1 before the first.
            node: that it happened to; this node if empty.
        """
        self._events.append(Event(round(time.time() * 1e6), node or self._ledger.node, kind, text, generation))
        self._store.put(self._events_key, encode_events(self._events))


@dataclass(frozen=True)
class JobRecord:
    """All that the Store has of a job.

    Attributes:
        job: its name.
        world: None where no agent has written it yet.
        nodes: all lives of its agents, in the order in which they began.
        events: oldest first.
        exclusions: hosts that it leaves out, in the order in which their GPUs failed.
    """

    job: str
    world: World | None
    nodes: tuple[NodeRecord, ...]
    events: tuple[Event, ...]
    exclusions: tuple[Exclusion, ...] = ()


def read_job(store: Store, job: str) -> JobRecord:
    """Read what the Store has of a job.

    Args:
        store: to read from.
        job: its name.

    Raises:
        SettingsError: it has nothing; the message names the jobs that it has.
        ProtocolError: what it has cannot be read by this version.
    """
    folder = _prefix(job)
    found = store.list(folder)
    if not found:
        known = ", ".join(list_jobs(store)) or "none at all"
        raise SettingsError(f"there is no job {job!r} in this store; there is {known}")
    return join_parts(job, [decode_part(entry.key, entry.value) for entry in found])


def decode_part(key: str, value: bytes) -> JobPart:
    """Read an entry of a job.

    Args:
        key: of the entry, from `jobs/` on.
        value: of the entry.

    Returns:
        What is there; None for what says nothing about where time went.

    Raises:
        ProtocolError: it cannot be read by this version.
    """
    _, _, part = key.split("/", 2) if key.count("/") > 1 else ("", "", "")
    if part == "world":
        return World.decode(value)
    if part.startswith("ledger/"):
        return decode_record(value, key)
    if part.startswith("events/"):
        return tuple(decode_events(value, key))
    return Exclusion.decode(value) if part.startswith("left-out/") else None


def join_parts(job: str, parts: Iterable[JobPart]) -> JobRecord:
    """Join the entries of a job.

    Args:
        job: its name.
        parts: what `decode_part` returned for its entries.
    """
    world: World | None = None
    nodes: list[NodeRecord] = []
    events: list[Event] = []
    exclusions: list[Exclusion] = []
    for part in parts:
        if isinstance(part, World):
            world = part
        elif isinstance(part, NodeRecord):
            nodes.append(part)
        elif isinstance(part, Exclusion):
            exclusions.append(part)
        elif part is not None:
            events += part
    nodes.sort(key=lambda record: (record.began_us, record.node))
    events.sort(key=lambda event: event.at_us)
    exclusions.sort(key=lambda exclusion: exclusion.at_s)
    return JobRecord(job, world, tuple(nodes), tuple(events), tuple(exclusions))


def last_step_before(store: Store, job: str, generation: int) -> int:
    """Return the last step that any node of a job ever finished before a generation, -1 for none.

    Other nodes may be at work in that generation already, and their steps in it do not count.

    Args:
        store: to read from.
        job: its name.
        generation: of the workers' world.

    Raises:
        DiscoveryError: the store does not answer.
    """
    highest = -1
    for entry in store.list(f"{_prefix(job)}ledger/"):
        with contextlib.suppress(ProtocolError):  # `edl status` reports it
            record = decode_record(entry.value, entry.key)
            highest = max(highest, record.reached, record.step if record.generation < generation else -1)
    return highest


def list_jobs(store: Store) -> list[str]:
    """Return the names of all jobs that the Store has anything of."""
    return sorted({entry.key.split("/")[1] for entry in store.list("jobs/")})


def delete_ledgers(store: Store, job: str) -> None:
    """Delete a job's ledgers and events, for a job that begins anew under the same name.

    Args:
        store: to delete from.
        job: its name.
    """
    for part in ("ledger/", "events/"):
        for entry in store.list(_prefix(job) + part):
            store.delete(entry.key)


def _prefix(job: str) -> str:
    if not job or "/" in job or not job.isprintable() or job in (".", ".."):
        raise SettingsError(f"job {job!r:.80}: a name has at least one printable character, and no '/'")
    return prefix(job)
