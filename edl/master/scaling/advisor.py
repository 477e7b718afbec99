"""`ScalingAdvisor`: a loop that reads loads, decides how many teachers and workers are wanted, and writes the numbers.

The advisors at a Store elect a leader (in the election `advisor`), which writes `wanted/teachers/SERVICE`. The other
advisors stand by, and warn if their bounds differ from the leader's. The advisor of a job's leading master writes how
many workers the job should have. An operator, or a person, starts and ends the teachers.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edl.background import BackgroundLoop
from edl.backoff import Backoff
from edl.discovery import Store
from edl.discovery.store import Election
from edl.errors import ClosedError, DiscoveryError
from edl.load_reporting import ServiceLoad, read_services, read_wanted
from edl.load_reporting.wanted import WANTED_VERSION, WantedKind, wanted_key
from edl.master.scaling.teachers import TeacherScalingSettings, TeacherScalingState, decide_teachers, observe_teachers
from edl.master.scaling.workers import WorkerDecision
from edl.quoting import shown
from edl.resource import Resource

logger = logging.getLogger(__name__)

_ELECTION = "advisor"
_MOST_DECISIONS = 20  # kept in a record, for people: a few kilobytes
INTERVAL_S = 2.0  # between two readings of all loads
_REFRESH_S = 5.0  # an unchanged record is rewritten after this time, to show that the advisor is alive
_LEASE_S = 10.0  # after which another advisor leads if the leader is lost
_LAST_RETRY_S = 10.0
_COMPARE_S = 10.0  # how often a standby advisor checks the leader's bounds


@dataclass(frozen=True)
class WorkerAdvice:
    """How many workers a job should have, and how many it has now."""

    job: str
    now: int
    decision: WorkerDecision


class ScalingAdvisor(Resource):
    """Writes how many teachers and workers are wanted, in its own thread, until it is closed.

    An unreachable Store is logged once and retried. `store` stays open when this is closed, and the records stay in it.
    `workers` returns how many workers a job should have, or None if that is unknown yet; it is called in the advisor's
    thread.
    """

    def __init__(
        self,
        store: Store,
        settings: TeacherScalingSettings | None = None,
        *,
        workers: Callable[[], WorkerAdvice | None] | None = None,
    ) -> None:
        super().__init__()
        self._store = store
        self._settings = settings or TeacherScalingSettings()
        self._workers = workers
        self._services: dict[str, _Wanted] = {}
        self._jobs: dict[str, _Wanted] = {}
        self._backoff = Backoff(INTERVAL_S, _LAST_RETRY_S, jitter=0.2)
        self._compare_at_s = 0.0
        self._other: tuple[object, ...] = ()
        bounds = {"least": self._settings.least, "most": self._settings.most}
        name = {"host": socket.gethostname(), "pid": os.getpid(), **bounds}
        self._election: Election = store.elect(_ELECTION, json.dumps(name).encode(), _LEASE_S)
        self._own(BackgroundLoop("edl-advisor", self._step))

    @property
    def is_leader(self) -> bool:
        """Whether this advisor currently decides about teachers."""
        return self._election.is_leader

    def wanted(self) -> dict[str, dict[str, Any]]:
        """Return the records that this advisor wrote last, by key in the Store. Callable from any thread."""
        found = [*list(self._services.values()), *list(self._jobs.values())]
        return {wanted.key: dict(wanted.record) for wanted in found if wanted.record}

    def _release(self) -> None:
        self._election.close()

    def _step(self) -> float | None:
        try:
            if self._election.is_leader:
                self._advise_teachers()
            else:
                self._services = {}  # another leader may decide differently in the meantime
                self._compare_bounds()
            self._advise_workers()
        except DiscoveryError as exc:
            if not self._backoff.failures:
                logger.warning("loads cannot be read, and the wanted numbers stay as they are: %s", exc)
            return self._backoff.next_wait_s()
        except ClosedError:
            return None
        if self._backoff.failures:
            logger.info("loads are read again")
            self._backoff.reset()
        return INTERVAL_S

    def _advise_teachers(self) -> None:
        loads = read_services(self._store)
        now_s = time.monotonic()
        for name in sorted(loads.keys() | self._services.keys()):
            service = self._services.get(name)
            if service is None:
                service = self._services[name] = self._restore("teachers", name)
            load = loads.get(name, ServiceLoad(name))
            if load.students or load.teachers:
                service.seen_s = now_s
            elif now_s - service.seen_s > self._settings.down_s:
                if self._election.is_leader:
                    self._store.delete(service.key)
                del self._services[name]
                continue
            observation = observe_teachers(load, now_s)
            state, decision = decide_teachers(service.state, observation, self._settings)
            if not self._election.is_leader:
                continue
            figures = {"demand": observation.demand, "rate": observation.rate}
            self._write(service, decision.count, decision.before, load.live + load.starting, decision.reason, figures)
            service.state = state  # only now: a decision that could not be written is repeated

    def _compare_bounds(self) -> None:
        now_s = time.monotonic()
        if now_s < self._compare_at_s:
            return
        self._compare_at_s = now_s + _COMPARE_S
        leader = _decode(self._election.leader())
        if not leader or self._election.is_leader:
            return
        other = tuple(leader.get(name) for name in ("host", "pid", "least", "most"))
        own = self._settings
        if other == self._other or other[2:] == (own.least, own.most):
            return
        self._other = other
        logger.warning(
            "this advisor stands by, so its bounds of %s teachers have no effect: the advisor that leads (process %s "
            "on %s) was given %s; give all masters of a store the same bounds, or, on Kubernetes, set minReplicas and "
            "maxReplicas of the pools",
            _describe_bounds(own.least, own.most),
            shown(str(other[1])),
            shown(str(other[0])),
            _describe_bounds(other[2], other[3]),
        )

    def _restore(self, kind: WantedKind, name: str) -> _Wanted:
        """Continue from another advisor's record, unless the record is older than any window."""
        found = read_wanted(self._store, kind, name)
        if found is None or time.time() - found["time"] > self._settings.down_s:
            return _Wanted(kind, name, {}, TeacherScalingState(), time.monotonic())
        return _Wanted(kind, name, found, TeacherScalingState(wanted=int(found["count"])), time.monotonic())

    def _advise_workers(self) -> None:
        advice = self._workers() if self._workers is not None else None
        if advice is None:
            self._jobs.clear()  # another master's advisor may write in the meantime
            return
        wanted = self._jobs.get(advice.job)
        if wanted is None:
            wanted = self._jobs[advice.job] = self._restore("workers", advice.job)
        before = int(wanted.record["count"]) if wanted.record else advice.now
        self._write(wanted, advice.decision.count, before, advice.now, advice.decision.reason, {})

    def _write(
        self, wanted: _Wanted, count: int, before: int, there: int, reason: str, figures: Mapping[str, Any]
    ) -> None:
        now_s, clock = time.monotonic(), time.time()
        moved = count != before
        if not moved and wanted.record and now_s - wanted.written_s < _REFRESH_S:
            return
        decisions = list(wanted.record.get("decisions", ()))
        if moved:
            decisions.append({"time": clock, "from": before, "count": count, "reason": reason})
        record = {
            "v": WANTED_VERSION,
            "service" if wanted.kind == "teachers" else "job": wanted.name,
            "count": count,
            "now": there,
            "reason": reason,
            "since": clock if moved else wanted.record.get("since", clock),
            "time": clock,
            **figures,
            "decisions": decisions[-_MOST_DECISIONS:],
        }
        self._store.put(wanted.key, json.dumps(record, allow_nan=False).encode())
        wanted.record, wanted.written_s = record, now_s
        if moved:
            logger.info("%s: %d -> %d %s: %s", wanted.name, before, count, wanted.kind, reason)


def _decode(value: bytes | None) -> dict[str, Any]:
    try:
        found = json.loads(value or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _describe_bounds(least: object, most: object) -> str:
    return shown(f"{least} or more" if most is None else f"{least} to {most}")


@dataclass
class _Wanted:
    """How many teachers of a service, or workers of a job, are wanted: the last record, and the decision's state."""

    kind: WantedKind
    name: str
    record: Mapping[str, Any]
    state: TeacherScalingState  # of a service
    seen_s: float  # when a student or teacher of the service last published
    written_s: float = 0.0

    @property
    def key(self) -> str:
        return wanted_key(self.kind, self.name)
