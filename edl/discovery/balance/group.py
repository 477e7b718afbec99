"""Students that watch the same service agree, through a store, on who talks to which teachers."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from typing_extensions import override

from edl.discovery.balance.assignment import DEFAULT_FAN_OUT
from edl.discovery.balance.member import GroupMember
from edl.discovery.balance.rules import GroupKeys, TeacherChoice, choose_lapsed, choose_teachers, unpack_links
from edl.discovery.common.resource import Resource
from edl.discovery.records import check_ttl
from edl.discovery.registry import Registry, Snapshot, Watch
from edl.discovery.store import Store, StoreSnapshot
from edl.errors import SettingsError

__all__ = ["BalanceGroup"]

LOOK_S = 0.1
"""How often a waiting member looks whether its links changed; a look is a glance into memory."""
PATIENCE_S = 1.0
"""How long a new member waits for its first links rather than start with teachers that it may have to leave at once."""


class BalanceGroup(Resource, Watch):
    """A `Watch` of the teachers that this student talks to, in place of `registry.watch(service)`.

    As long as all teachers fit within the student's limit it is given all of them, and the store plays no part. Beyond,
    the students elect a leader, which computes `balance` and writes all links into the store. A student that
    has no links, or whose store does not answer, stays with the teachers it has and fills up to its limit with others;
    the snapshot's `stale` says so. While a teacher is live it never has none. A draining teacher is given to none;
    the students that have it see it drain. Teachers whose registration lapsed fill up what is left of the limit.

    A background thread runs; the `Registry` and the `Store` stay the caller's to close.

    Args:
        student_id: unique among the students of the service; the same after a restart keeps the same teachers.
        want: the most teachers this student can use.
        fan_out: the most teachers any student may talk to. Of both the smaller counts; 32 if neither is given.
        ttl_s: how long this student, or the leader, may be silent before the others go on without it.

    Raises:
        SettingsError: an argument cannot be used.
        DiscoveryError: the registry cannot be reached. A store that cannot be reached is no error.
    """

    def __init__(
        self,
        registry: Registry,
        store: Store,
        service: str,
        student_id: str,
        *,
        want: int | None = None,
        fan_out: int | None = None,
        ttl_s: float = 10.0,
    ) -> None:
        super().__init__()
        self._limit = min((limit for limit in (want, fan_out) if limit is not None), default=DEFAULT_FAN_OUT)
        if self._limit < 1:
            raise SettingsError(f"want={want!r}, fan_out={fan_out!r}: a student needs at least 1 teacher")
        ttl_s = check_ttl(ttl_s)
        self._student = student_id
        self._links_key = GroupKeys(service).links_of(student_id)
        self._taking = threading.Lock()
        self._patient_until = time.monotonic() + PATIENCE_S
        self._seen: Snapshot | None = None
        self._links: StoreSnapshot | None = None
        self._given: Snapshot | None = None
        self._teachers = registry.watch(service)
        self._member = self._own(GroupMember(registry, store, service, student_id, self._limit, ttl_s))

    @property
    def error(self) -> str:
        """Why this student cannot take part in the group just now; empty while all is well."""
        return self._member.error

    @property
    def is_leader(self) -> bool:
        """Whether this student decides for the group now."""
        return self._member.is_leader

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
            # A change of the teachers is waited for, one of the links found soon after.
            asked = time.monotonic()
            wait_s = max(0.0, min(LOOK_S, deadline - asked))
            seen = self._teachers.get(wait_s)
            if seen is None and wait_s and time.monotonic() - asked < wait_s / 2:
                return None  # it did not wait: the registry was closed, and this watch with it
            self._seen = seen or self._seen
            self._links = self._member.take_links() or self._links
            if (snapshot := self._decide()) is not None and snapshot != self._given and not self._closed:
                self._given = snapshot
                return snapshot
            if time.monotonic() >= deadline:
                return None
        return None

    def _halt(self) -> None:
        self._teachers.close()

    def _decide(self) -> Snapshot | None:
        """Return what to give out; None while nothing is known, or a better answer is about to come."""
        if self._seen is None:
            return None
        links, reason = self._known_links()
        ready = [teacher for teacher in self._seen.instances if teacher.state == "ready"]
        before = () if self._given is None else (*self._given.instances, *self._given.lapsed)
        last = frozenset(teacher.id for teacher in before)
        choice = choose_teachers(self._student, self._limit, ready, links, last)
        # A reason is no cause for haste while the links are about to be read: a student that was killed and is back
        # cannot take part until its former lease ends, but its links are there.
        awaited = not reason or (self._links is None and self._member.reads_links)
        if not choice.coordinated and self._given is None and awaited and time.monotonic() < self._patient_until:
            return None
        given = choice.ids | {teacher.id for teacher in self._seen.instances if teacher.state != "ready"} & last
        tried = choose_lapsed(self._student, self._limit - len(choice.ids), self._seen.lapsed, links, last)
        listed = {teacher.id for teacher in (*self._seen.instances, *self._seen.lapsed)}
        revoked = last if self._given is None else last | self._given.revoked
        return replace(
            self._seen,
            instances=tuple(teacher for teacher in self._seen.instances if teacher.id in given),
            stale=self._seen.stale if choice.coordinated else self._explain(choice, reason),
            lapsed=tuple(teacher for teacher in self._seen.lapsed if teacher.id in tried),
            revoked=(revoked & listed) - given - tried,
        )

    def _known_links(self) -> tuple[frozenset[str] | None, str]:
        """Return the links if they are valid now, or the reason why not."""
        if self._links is None:
            return None, self._member.error
        if reason := self._links.stale or self._member.over:
            return None, reason
        entry = self._links.entries.get(self._links_key)
        if entry is None:
            return None, self._member.error
        try:
            return unpack_links(entry.value), ""
        except ValueError as exc:
            return None, f"the store's {self._links_key} makes no sense: {exc}"

    def _explain(self, choice: TeacherChoice, reason: str) -> str:
        assert self._seen is not None
        why = f"students cannot agree on their teachers: {reason}" if reason else "students have not agreed yet"
        stale = f"{why}; this one goes on with {len(choice.ids)} of its own choice"
        return "; ".join(filter(None, [self._seen.stale, stale]))
