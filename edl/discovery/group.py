"""Lets students that watch the same service agree, through a store, on which teachers each student talks to.

The students elect a leader, which calls `balance` and writes all students' links to the store. The group uses these
keys in the store, below `balance/SERVICE/`:

- `students/STUDENT`, under the student's lease: `{"limit": n}`, the most teachers that the student talks to.
- `links/STUDENT`, written by the leader: `{"teachers": [id, ...]}`. If all teachers fit within a student's limit, the
  student has no links and talks to all teachers.

The pure functions `choose_teachers`, `choose_lapsed` and `plan_links` make the decisions. A student watches a
`BalanceGroup`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

from typing_extensions import override

from edl.background import BackgroundLoop
from edl.discovery.balance import balance
from edl.discovery.records import Instance, Snapshot, check_ttl
from edl.discovery.registry import Registry, Watch
from edl.discovery.store import MAX_VALUE_BYTES, Election, Entry, Lease, Store, StoreSnapshot, StoreWatch
from edl.errors import ClosedError, ConflictError, DiscoveryError, LeaseLostError, SettingsError
from edl.quoting import shown

log = logging.getLogger("edl.discovery")

MAX_ID_BYTES: Final = 100
"""Maximum length of a student's id. Escaping makes an id up to three times as long, and the escaped id still fits into
a key of 512 characters."""
LOOK_S: Final = 0.1
"""How often a waiting member checks whether its links changed; the check only reads memory."""
PATIENCE_S: Final = 1.0
"""How long a new member waits for its first links: without the wait, it might have to leave its first teachers at
once."""
STEP_S: Final = 0.1
"""How often to check for changes; the check only reads memory, and does not query the store."""
RETRY_S: Final = 1.0
"""Wait after the store failed to answer. Meanwhile students choose for themselves, so nothing is urgent."""
REMEMBERED: Final = 1000
"""Number of departed students whose teachers a leader remembers. The memory takes about 100 kB, and covers more
students than restart at the same time."""


class GroupKeys:
    """The keys of a service's group: the leader's election, and the prefixes of students' keys and of their links."""

    def __init__(self, service: str) -> None:
        self.service = service
        self.election = f"balance/{service}"
        self.students = f"{self.election}/students/"
        self.links = f"{self.election}/links/"

    def student(self, student: str) -> str:
        """Return the key under which a student lists itself."""
        return self.students + _part(student)

    def links_of(self, student: str) -> str:
        """Return the key of a student's links."""
        return self.links + _part(student)

    def student_in(self, key: str) -> str:
        """Return the student in a key below `students` or `links`; raise ValueError if the key contains no student."""
        student = unquote(key.rpartition("/")[2])
        if key not in (self.student(student), self.links_of(student)):
            raise ValueError("not the key of a student")
        return student


def _part(student: str) -> str:
    """Return `student`, which may contain any characters, as a part of a key."""
    if not isinstance(student, str) or not 0 < len(student.encode(errors="replace")) <= MAX_ID_BYTES:
        raise SettingsError(f"student_id={student!r:.200}: must be text of 1 to {MAX_ID_BYTES} bytes")
    try:
        return quote(student, safe="").replace(".", "%2E")
    except UnicodeEncodeError as exc:
        raise SettingsError(f"student_id={student!a}: cannot be written as UTF-8") from exc


def pack_limit(limit: int) -> bytes:
    """Return the value of a student's key."""
    return json.dumps({"limit": limit}).encode()


def unpack_limit(value: bytes) -> int:
    """Return the limit in a student's key; raise ValueError if the value is invalid."""
    limit = _field(value, "limit")
    if type(limit) is not int or limit < 1:
        raise ValueError(f"limit {limit!r:.80} is not a whole number above 0")
    return limit


def pack_links(teachers: Iterable[str]) -> bytes:
    """Return the value of a student's links."""
    return json.dumps({"teachers": sorted(teachers)}, separators=(",", ":")).encode()


def unpack_links(value: bytes) -> frozenset[str]:
    """Return the teachers in a student's links; raise ValueError if the value is invalid."""
    teachers = _field(value, "teachers")
    if not isinstance(teachers, list) or not all(isinstance(teacher, str) for teacher in teachers):
        raise ValueError(f"teachers {teachers!r:.80} is not a list of ids")
    return frozenset(teachers)


def _field(value: bytes, name: str) -> Any:
    try:
        fields = json.loads(value)
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc
    if not isinstance(fields, dict) or name not in fields:
        raise ValueError(f"{value!r:.80} has no field {name!r}")
    return fields[name]


# --- What a student decides ---


class TeacherChoice(NamedTuple):
    """The teachers that a student talks to, chosen by the group (`coordinated`) or by the student alone."""

    ids: frozenset[str]
    coordinated: bool


def choose_teachers(
    student: str, limit: int, ready: Collection[Instance], links: frozenset[str] | None, last: Collection[str]
) -> TeacherChoice:
    """Decide which of the `ready` teachers a student talks to: at least one, if any is ready.

    `links` contains the teachers that the leader assigned to the student; None if they are unknown or possibly out of
    date. `last` contains the teachers that the student has used until now.
    """
    ids = frozenset(teacher.id for teacher in ready)
    if len(ids) <= limit:
        return TeacherChoice(ids, coordinated=True)
    if links is not None and ids & links:
        return TeacherChoice(ids & links, coordinated=True)
    # Without links: keep the present teachers, and add some that differ by student, so that students spread. With
    # rendezvous hashing, a change of the teachers changes few choices.
    return TeacherChoice(frozenset(_ranked(student, ids, last)[:limit]), coordinated=False)


def choose_lapsed(
    student: str, room: int, lapsed: Iterable[Instance], links: frozenset[str] | None, last: Collection[str]
) -> frozenset[str]:
    """Decide which lapsed teachers a student tries: at most `room`, which is its limit minus its ready teachers."""
    ranked = _ranked(student, (teacher.id for teacher in lapsed), last)
    ranked.sort(key=lambda name: links is not None and name not in links)
    return frozenset(ranked[: max(room, 0)])


def _ranked(student: str, ids: Iterable[str], last: Collection[str]) -> list[str]:
    """Return `ids` in an order specific to this student, with the ids in `last` first."""
    ranks = {name: (name not in last, hashlib.blake2b(f"{student}\0{name}".encode()).digest()) for name in ids}
    return sorted(ranks, key=ranks.__getitem__)


# --- What the leader decides ---


@dataclass(frozen=True)
class LinkPlan:
    """The teachers of every student, and the changes that the leader must make in the store.

    `refused` maps keys to reasons, for invalid entries in the store and for links that do not fit into a value. A
    student whose limit is invalid gets no links.
    """

    links: Mapping[str, tuple[str, ...]]
    writes: Mapping[str, bytes]
    deletes: tuple[str, ...]
    refused: Mapping[str, str]


def plan_links(
    keys: GroupKeys,
    ready: Collection[Instance],
    students: Iterable[Entry],
    stored: Iterable[Entry],
    remembered: Mapping[str, tuple[str, ...]],
) -> LinkPlan:
    """Balance the teachers, and compare the result with the entries below `keys.links` (`stored`).

    `students` contains the entries below `keys.students`. `remembered` contains the last planned links, used for
    students that have no links in the store because they talk to all teachers or have left.
    """
    limits: dict[str, int] = {}
    present: dict[str, bytes] = {}
    previous: dict[str, Collection[str]] = dict(remembered)
    refused: dict[str, str] = {}
    for entry in students:
        try:
            limits[keys.student_in(entry.key)] = unpack_limit(entry.value)
        except ValueError as exc:
            refused[entry.key] = str(exc)
    for entry in stored:
        present[entry.key] = entry.value
        try:
            previous[keys.student_in(entry.key)] = unpack_links(entry.value)
        except ValueError as exc:
            refused[entry.key] = str(exc)
    links = balance({teacher.id: teacher.capacity for teacher in ready}, limits, previous)
    writes: dict[str, bytes] = {}
    for student, teachers in links.items():
        value = pack_links(teachers)
        if len(value) > MAX_VALUE_BYTES:
            refused[keys.links_of(student)] = f"{len(teachers)} teachers do not fit into one value of the store"
        elif len(ready) > limits[student]:
            writes[keys.links_of(student)] = value
    return LinkPlan(
        links=links,
        writes={key: value for key, value in writes.items() if present.get(key) != value},
        deletes=tuple(sorted(present.keys() - writes.keys())),
        refused=refused,
    )


# --- The group ---


class BalanceGroup(Watch):
    """A `Watch` of the teachers that this student talks to; use it instead of `registry.watch(service)`.

    As long as all teachers fit within the student's limit, the student gets all of them, and the store is not needed.
    If there are more teachers, a leader assigns them (see the module docstring). A student that has no links, or whose
    store does not answer, keeps its teachers and adds other teachers up to its limit; the snapshot's `stale` then gives
    the reason. A student always has a teacher while any teacher is ready. A draining teacher is not assigned to
    students; students that already have this teacher see its state "draining". Teachers whose registration has lapsed
    fill the rest of the limit.

    Args:
        registry: Where the teachers are registered; the caller closes it.
        store: The store through which the students agree; the caller closes it.
        service: The teachers' service.
        student_id: Unique among the students of the service; reuse it after a restart to keep the same teachers.
        want: The most teachers that this student talks to.
        ttl_s: Seconds that this student, or the leader, may be silent before the other students continue without it.

    Raises:
        SettingsError: An argument cannot be used.
        DiscoveryError: The registry cannot be reached. An unreachable store does not raise.
    """

    def __init__(
        self,
        registry: Registry,
        store: Store,
        service: str,
        student_id: str,
        *,
        want: int,
        ttl_s: float = 10.0,
    ) -> None:
        super().__init__()
        if want < 1:
            raise SettingsError(f"want={want!r}: a student needs at least 1 teacher")
        self._limit = want
        self._store = store
        self._keys = GroupKeys(service)
        self._student = student_id
        self._ttl_s = check_ttl(ttl_s)
        self._links_key = self._keys.links_of(student_id)
        self._taking = threading.Lock()
        self._patient_until = time.monotonic() + PATIENCE_S
        self._seen: Snapshot | None = None
        self._links: StoreSnapshot | None = None
        self._given: Snapshot | None = None
        # Resources of the thread: it opens them, and `_release` closes them.
        self._error = ""
        self._over = ""  # why this student cannot take part again: the store was closed
        self._links_watch: StoreWatch | None = None
        self._lease: Lease | None = None
        self._listed = False
        self._election: Election | None = None
        self._leader = _Leader(registry, store, self._keys, self._ttl_s)
        self._teachers = registry.watch(service)
        self._own(BackgroundLoop("edl-balance", self._take_part))

    @property
    def error(self) -> str:
        """Why this student cannot take part in the group now; empty if it can."""
        return self._error

    @property
    def is_leader(self) -> bool:
        """Whether this student is the group's leader now."""
        return self._election is not None and self._election.is_leader and not self._closed

    @override
    def get(self, timeout_s: float | None = None) -> Snapshot | None:
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        if not self._closed:
            self._check()
        if not self._taking.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return None
        try:
            return self._get(deadline)
        finally:
            self._taking.release()

    def _get(self, deadline: float) -> Snapshot | None:
        while not self._closed:
            # Wait for a change of the teachers; a change of the links is noticed soon after.
            asked = time.monotonic()
            wait_s = max(0.0, min(LOOK_S, deadline - asked))
            seen = self._teachers.get(wait_s)
            if seen is None and wait_s and time.monotonic() - asked < wait_s / 2:
                return None  # it did not wait: the registry was closed, and this watch with it
            self._seen = seen or self._seen
            if self._links_watch is not None:
                self._links = self._links_watch.get(0) or self._links
            if (snapshot := self._decide()) is not None and snapshot != self._given and not self._closed:
                self._given = snapshot
                return snapshot
            if time.monotonic() >= deadline:
                return None
        return None

    def _decide(self) -> Snapshot | None:
        """Return the snapshot to hand out; None while nothing is known, or if a better snapshot will follow soon."""
        if self._seen is None:
            return None
        links, reason = self._known_links()
        ready = [teacher for teacher in self._seen.instances if teacher.state == "ready"]
        before = () if self._given is None else (*self._given.instances, *self._given.lapsed)
        last = frozenset(teacher.id for teacher in before)
        choice = choose_teachers(self._student, self._limit, ready, links, last)
        # Even with a reason, wait while the links are about to be read: a student that was killed and restarted cannot
        # take part until its former lease ends, but its links exist.
        awaited = not reason or (self._links is None and self._links_watch is not None)
        if not choice.coordinated and self._given is None and awaited and time.monotonic() < self._patient_until:
            return None
        given = choice.ids | {teacher.id for teacher in self._seen.instances if teacher.state != "ready"} & last
        tried = choose_lapsed(self._student, self._limit - len(choice.ids), self._seen.lapsed, links, last)
        listed = {teacher.id for teacher in (*self._seen.instances, *self._seen.lapsed)}
        revoked = last if self._given is None else last | self._given.revoked
        stale = self._seen.stale
        if not choice.coordinated:
            why = f"students cannot agree on their teachers: {reason}" if reason else "students have not agreed yet"
            why = f"{why}; this student continues with {len(choice.ids)} teachers of its own choice"
            stale = f"{stale}; {why}" if stale else why
        return replace(
            self._seen,
            instances=tuple(teacher for teacher in self._seen.instances if teacher.id in given),
            stale=stale,
            lapsed=tuple(teacher for teacher in self._seen.lapsed if teacher.id in tried),
            revoked=(revoked & listed) - given - tried,
        )

    def _known_links(self) -> tuple[frozenset[str] | None, str]:
        """Return the links if they are valid now, or the reason why they are not."""
        if self._links is None:
            return None, self._error
        if reason := self._links.stale or self._over:
            return None, reason
        entry = self._links.entries.get(self._links_key)
        if entry is None:
            return None, self._error
        try:
            return unpack_links(entry.value), ""
        except ValueError as exc:
            return None, f"the store's {self._links_key} is invalid: {exc}"

    # The thread, which keeps this student in its group

    def _take_part(self) -> float | None:
        try:
            self._join()
        except (ConflictError, DiscoveryError, LeaseLostError) as exc:
            if not self._error:
                log.warning("student %s cannot take part in %s: %s", self._student, self._keys.election, exc)
            self._error = str(exc)
            return RETRY_S
        except ClosedError as exc:
            self._over = self._error = str(exc)
            return None
        if self._error:
            log.info("student %s takes part in %s again", self._student, self._keys.election)
            self._error = ""
        return STEP_S

    def _join(self) -> None:
        if self._links_watch is None:
            self._links_watch = self._store.watch(self._links_key)
        if self._lease is None or self._lease.lost:
            self._listed = False
            if self._lease is not None:
                self._lease.close()
            self._lease = self._store.lease(self._ttl_s)
        if not self._listed:
            self._store.put(self._keys.student(self._student), pack_limit(self._limit), self._lease)
            self._listed = True
        if self._election is None:
            self._election = self._store.elect(self._keys.election, self._student.encode(), self._ttl_s)
        if self.is_leader:
            self._leader.lead(lambda: self.is_leader)
        else:
            self._leader.rest()

    def _halt(self) -> None:
        self._teachers.close()

    def _release(self) -> None:
        self._leader.rest()
        for part in (self._election, self._links_watch):
            if part is not None:
                part.close()
        if self._lease is None:
            return
        self._lease.close()
        try:
            self._store.delete(self._links_key)
        except (ClosedError, DiscoveryError) as exc:
            log.debug("the next leader has to delete the links of student %s: %s", self._student, exc)


class _Leader:
    """Follows teachers and students, and keeps the links in the store balanced."""

    def __init__(self, registry: Registry, store: Store, keys: GroupKeys, ttl_s: float) -> None:
        self._registry = registry
        self._store = store
        self._keys = keys
        self._ttl_s = ttl_s
        self._teachers: Watch | None = None
        self._students: StoreWatch | None = None
        self.rest()

    def rest(self) -> None:
        """Stop following, and forget everything."""
        for watch in (self._teachers, self._students):
            if watch is not None:
                watch.close()
        self._teachers = self._students = None
        self._ready: Snapshot | None = None
        self._listed: StoreSnapshot | None = None
        self._balanced: tuple[Snapshot, StoreSnapshot] | None = None
        self._check_at = 0.0
        self._planned: Mapping[str, tuple[str, ...]] = {}
        self._refused: Mapping[str, str] = {}

    def lead(self, still: Callable[[], bool]) -> None:
        """Balance if anything has changed, and at least every `ttl_s`: a former leader may have written late."""
        if self._teachers is None:
            self._teachers = self._registry.watch(self._keys.service)
        if self._students is None:
            self._students = self._store.watch(self._keys.students)
        self._ready = self._teachers.get(0) or self._ready
        self._listed = self._students.get(0) or self._listed
        if self._ready is None or self._listed is None or self._ready.stale or self._listed.stale:
            return
        seen = self._ready, self._listed
        if seen == self._balanced and time.monotonic() < self._check_at:
            return
        stored = self._store.list(self._keys.links)
        ready = [teacher for teacher in self._ready.instances if teacher.state == "ready"]
        todo = plan_links(self._keys, ready, self._listed.entries.values(), stored, self._planned)
        self._report(todo.refused)
        if self._carry_out(todo, stored, still):
            self._balanced = seen
            self._remember(todo.links)
            self._check_at = time.monotonic() + self._ttl_s

    def _remember(self, links: Mapping[str, tuple[str, ...]]) -> None:
        """Keep planned links and departed students' links: a student whose lease lapses may return soon."""
        gone = [(student, teachers) for student, teachers in self._planned.items() if student not in links]
        self._planned = dict(gone[-REMEMBERED:]) | dict(links)

    def _carry_out(self, todo: LinkPlan, stored: list[Entry], still: Callable[[], bool]) -> bool:
        """Write the changes; return False if a new plan is needed because another student has written or now leads."""
        versions = {entry.key: entry.version for entry in stored}
        for key in (*todo.writes, *todo.deletes):
            if not still():
                return False
            if key in todo.writes:
                done = self._store.compare_and_set(key, todo.writes[key], versions.get(key)) is not None
            else:
                done = self._store.delete(key, versions[key])
            if not done:
                return False
        return True

    def _report(self, refused: Mapping[str, str]) -> None:
        for key, reason in refused.items():
            if self._refused.get(key) != reason:
                log.warning("%s is left out of the balance: %s", shown(key), shown(reason))
        self._refused = refused
