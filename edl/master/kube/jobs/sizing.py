"""How many workers a job is to have now: its target, who goes first when it shrinks, and how far it grows at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Final

from edl.master.kube.jobs.gangs import starts_as_gang
from edl.master.kube.jobs.launches import WORKER
from edl.master.kube.members import MemberPod, MemberRecord
from edl.master.kube.members.review import NO_ROOM
from edl.master.kube.observation import OwnerObservation
from edl.master.kube.resources import ElasticJob

__all__ = ["Sizing", "find_target", "size_workers"]

PROBE_S: Final = 20.0
"""A worker beyond the minimum that no node takes for so long is let go: others may wait for the same room."""
_GIVING_S: Final = 60.0
"""Longer than that where the arbiter has given it room: whoever has that room yet has a grace period to leave it."""
_MOST_CREATED: Final = 100
"""Pods that a look makes at most: others wait for their look, and the API server for its turn."""
_NEXT_CREATED_S: Final = 0.5
"""After so long the next are made."""
_MOST_BACKOFF_S: Final = 300.0
"""As in the relaunch table: what waits longer is forgotten by people."""


@dataclass(frozen=True)
class Sizing:
    """Which workers there are to be.

    Attributes:
        target: how many are wanted.
        records: of all members, with those that are let go released.
        kept: keys of members whose pods stay.
        create: indices of workers whose pods are to be made now.
        shrunk: keys of members that go since fewer are wanted.
        homeless: keys of members beyond the minimum that go since no node takes them.
        waiting: keys of members that are made later -> when, Unix time.
        look_again_s: when the decision changes by time alone, Unix time; None for never.
    """

    target: int
    records: Mapping[str, MemberRecord]
    kept: tuple[str, ...]
    create: tuple[int, ...]
    shrunk: tuple[str, ...]
    homeless: tuple[str, ...]
    waiting: Mapping[str, float]
    look_again_s: float | None


def find_target(job: ElasticJob, observation: OwnerObservation) -> int:
    """Return how many workers are wanted, from the job's minimum to its maximum."""

    def clamp(count: int) -> int:
        return max(job.min_replicas, min(job.max_replicas, count))

    if job.scaling == "external":
        return clamp(job.min_replicas if job.replicas is None else job.replicas)
    if observation.store.wanted is not None:
        useful = clamp(observation.store.wanted)
    elif observation.store.stale:  # what is useful is not known now, which is no reason to change anything
        before = job.status.get("wantedReplicas")
        useful = clamp(before if isinstance(before, int) else job.min_replicas)
    else:
        useful = job.max_replicas
    return useful if observation.allocation is None else min(useful, clamp(observation.allocation))


def size_workers(
    job: ElasticJob,
    observation: OwnerObservation,
    records: Mapping[str, MemberRecord],
    current: Mapping[str, MemberPod],
    count_fitting: Callable[[int], int | None],
) -> Sizing:
    """Decide which workers stay, go and come.

    The minimum is made at once, and what ended comes back at once where its place is still its own. Beyond that the job
    grows into room that is there: as many as fit, where that is known or the arbiter has given them; else by a single
    worker that waits for a node, and is let go if there is none.

    `count_fitting` says how many pods of the worker of an index fit now; None if that is not known.
    """
    now_s, target = observation.now_s, find_target(job, observation)
    gang, after = starts_as_gang(job), dict(records)
    workers = {key: pod for key, pod in current.items() if pod.role == WORKER}
    ranked = sorted(workers, key=lambda key: _rank(workers[key], gang))
    kept, shrunk = ranked[:target], ranked[target:]
    homeless: list[str] = []
    times: list[float] = []
    if not gang:
        patience_s = PROBE_S if observation.allocation is None else PROBE_S + _GIVING_S
        for key in kept[job.min_replicas :]:
            if workers[key].pending:
                times.append(workers[key].created_s + patience_s)
                if now_s >= times[-1]:
                    homeless.append(key)
    for key in (*shrunk, *homeless):
        after[key] = after[key].begin_try(now_s)
    for key in homeless:
        after[key] = _back_off(after[key], now_s)
    kept = [key for key in kept if key not in homeless]
    create, waiting = _find_indices(job, observation, after, workers, kept, target, count_fitting)
    _displace_others(after, {*waiting, *(f"{WORKER}-{index}" for index in create)})
    if len(create) > _MOST_CREATED:
        create = create[:_MOST_CREATED]
        times.append(now_s + _NEXT_CREATED_S)
    times = [time_s for time_s in [*times, *waiting.values()] if time_s > now_s]
    return Sizing(
        target=target,
        records=after,
        kept=tuple(kept),
        create=tuple(create),
        shrunk=tuple(shrunk),
        homeless=tuple(homeless),
        waiting=waiting,
        look_again_s=min(times, default=None),
    )


def _rank(pod: MemberPod, gang: bool) -> tuple[float, ...]:
    """Return by what workers are ordered: who comes last goes first. A gang's minimum are its first indices."""
    if gang:
        return (pod.index,)
    return (not pod.scheduled, not pod.ready, pod.created_s, pod.index)


def _find_indices(
    job: ElasticJob,
    observation: OwnerObservation,
    records: Mapping[str, MemberRecord],
    workers: Mapping[str, MemberPod],
    kept: list[str],
    target: int,
    count_fitting: Callable[[int], int | None],
) -> tuple[list[int], dict[str, float]]:
    """Return the indices whose pods are to be made now, and the members that wait for their time."""
    create: list[int] = []
    waiting: dict[str, float] = {}
    growth: list[int] = []
    missing, indices = target - len(kept), _order_indices(job, records, observation.now_s)
    while missing > 0:
        free = next(indices)
        key = f"{WORKER}-{free}"
        record = records.get(key, MemberRecord())
        if (key in workers and key in kept) or record.ended:
            continue
        missing -= 1
        if not record.can_start(observation.now_s):
            waiting[key] = record.not_before_s or observation.now_s
        elif len(kept) + len(create) < job.min_replicas or record.replaces:
            create.append(free)
        else:
            growth.append(free)
    pending = any(workers[key].pending for key in kept) or bool(create)
    blocked = any(NO_ROOM in records[key].failures for key in waiting if key in records)
    if growth and not blocked and (not pending or observation.allocation is not None):
        create += growth[: _count_growth(job, observation, growth, count_fitting)]
    return create, waiting


def _displace_others(records: dict[str, MemberRecord], wanted: Set[str]) -> None:
    """Note that places of workers that ended are not theirs any more where fewer are wanted by now."""
    for key, record in records.items():
        if record.replaces and key.startswith(f"{WORKER}-") and key not in wanted:
            records[key] = record.displace()


def _order_indices(job: ElasticJob, records: Mapping[str, MemberRecord], now_s: float) -> Iterator[int]:
    """Yield indices of workers in the order in which they are filled: first those whose pods have just ended.

    Their places are their own. An index that is free since the job shrank is growth, which waits for room. A gang's
    minimum are its first indices, so that a gang has them in their order alone.
    """
    back: list[int] = []
    if not starts_as_gang(job):
        keys = (key for key, record in records.items() if record.replaces and record.can_start(now_s))
        back = sorted(int(key.removeprefix(f"{WORKER}-")) for key in keys if key.startswith(f"{WORKER}-"))
    yield from back
    yield from (index for index in itertools.count() if index not in back)


def _count_growth(
    job: ElasticJob, observation: OwnerObservation, growth: list[int], count_fitting: Callable[[int], int | None]
) -> int:
    if observation.allocation is not None:
        return len(growth)  # the arbiter has counted the room, and what teachers give back
    fitting = count_fitting(growth[0])
    if fitting is None or starts_as_gang(job):
        return 1
    # Who asked for a number has it tried; who only takes what is idle waits until something is.
    return max(fitting, 1 if job.scaling == "external" else 0)


def _back_off(record: MemberRecord, now_s: float) -> MemberRecord:
    count = record.failures.get(NO_ROOM, 0) + 1
    delay_s = min(_MOST_BACKOFF_S, PROBE_S * 2 ** min(count - 1, 10))
    not_before_s = max(now_s + delay_s, record.not_before_s or 0.0)
    return replace(record, failures={**record.failures, NO_ROOM: count}, not_before_s=not_before_s)
