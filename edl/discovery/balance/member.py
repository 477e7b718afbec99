"""A student's part in a balance group: to be listed in the store, and to decide for all while it is the leader."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from edl.background import BackgroundLoop
from edl.discovery.balance.rules import GroupKeys, LinkPlan, pack_limit, plan_links
from edl.discovery.common.resource import Resource
from edl.discovery.registry import Registry, Snapshot, Watch
from edl.discovery.store import Election, Entry, Lease, Store, StoreSnapshot, StoreWatch
from edl.errors import ClosedError, ConflictError, DiscoveryError, LeaseLostError
from edl.quoting import shown

__all__ = ["GroupMember"]

log = logging.getLogger("edl.discovery")

STEP_S = 0.1
"""How often to look whether anything changed: glances into memory, nothing is asked of the store."""
RETRY_S = 1.0
"""Wait after the store did not answer: students choose for themselves meanwhile, so nothing is urgent."""
REMEMBERED = 1000
"""How many students that left a leader remembers the teachers of: some 100 kB, and more than restart at one time."""


class GroupMember(Resource):
    """Keeps a student in its group with a background thread. Everything it opens, it closes."""

    def __init__(self, registry: Registry, store: Store, service: str, student: str, limit: int, ttl_s: float) -> None:
        super().__init__()
        self._store = store
        self._keys = GroupKeys(service)
        self._student = student
        self._limit = limit
        self._ttl_s = ttl_s
        self._error = ""
        self._over = ""
        self._links: StoreWatch | None = None
        self._lease: Lease | None = None
        self._listed = False
        self._election: Election | None = None
        self._leader = _Leader(registry, store, self._keys, self._ttl_s)
        self._own(BackgroundLoop("edl-balance", self._step))

    @property
    def error(self) -> str:
        """Why this student cannot take part just now; empty while all is well."""
        return self._error

    @property
    def over(self) -> str:
        """Why this student will never take part again (the store was closed); empty otherwise."""
        return self._over

    @property
    def is_leader(self) -> bool:
        """Whether this student decides for the group."""
        return self._election is not None and self._election.is_leader and not self._closed

    @property
    def reads_links(self) -> bool:
        """Whether the store has been asked for this student's links."""
        return self._links is not None

    def take_links(self) -> StoreSnapshot | None:
        """Return what the store says of this student's links, None if that is nothing new. Does not wait."""
        return None if self._links is None else self._links.get(0)

    def _step(self) -> float | None:
        try:
            self._take_part()
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

    def _take_part(self) -> None:
        if self._links is None:
            self._links = self._store.watch(self._keys.links_of(self._student))
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

    def _release(self) -> None:
        self._leader.rest()
        for part in (self._election, self._links):
            if part is not None:
                part.close()
        if self._lease is None:
            return
        self._lease.close()
        try:
            self._store.delete(self._keys.links_of(self._student))
        except (ClosedError, DiscoveryError) as exc:
            log.debug("the links of student %s are left to the next leader to delete: %s", self._student, exc)


class _Leader:
    """Follows teachers and students, and keeps all links in the store in balance."""

    def __init__(self, registry: Registry, store: Store, keys: GroupKeys, ttl_s: float) -> None:
        self._registry = registry
        self._store = store
        self._keys = keys
        self._ttl_s = ttl_s
        self._teachers: Watch | None = None
        self._students: StoreWatch | None = None
        self.rest()

    def rest(self) -> None:
        """Follow nothing, and forget everything."""
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
        """Balance if anything changed, and once per `ttl_s` in any case: a former leader may have written late."""
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
        """Keep what was planned, and what departed students had: a student whose lease lapses may be back soon."""
        gone = [(student, teachers) for student, teachers in self._planned.items() if student not in links]
        self._planned = dict(gone[-REMEMBERED:]) | dict(links)

    def _carry_out(self, todo: LinkPlan, stored: list[Entry], still: Callable[[], bool]) -> bool:
        """Write what changes; return False if another student wrote or leads by now, and it has to be thought over."""
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
