"""Events of services, found by comparing two looks: teachers and students that came, drain, or are gone.

A registry keeps no history, so what happened while no dashboard looked shows as of the next look.

What does not belong here: events that are recorded somewhere (`events`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from edl.dashboard.state.schema import EventRow, ServiceStatus
from edl.settings import DiscoverySettings

__all__ = ["find_changes"]

_LAPSED: Final = "its lease ran out: the process is dead or paused, or cannot reach the registry"
_DRAINED: Final = "it had drained"
_LEFT: Final = "its registration was removed: it closed"
_GONE: Final = (
    "its record ended: it closed, or was killed or stood still for longer than its lease "
    f"({DiscoverySettings.ttl_s:g} s by default)"
)
_KINDS: Final = {"ready": "join", "starting": "starting", "draining": "draining", "lapsed": "lapsed"}
_TEXTS: Final = {
    "ready": "the teacher is ready",
    "starting": "a teacher starts",
    "draining": "the teacher finishes what it has",
    "lapsed": "the teacher is gone",
}


def find_changes(before: Sequence[ServiceStatus], after: Sequence[ServiceStatus], now_s: float) -> Iterator[EventRow]:
    """Yield what happened between two looks.

    Args:
        before: the services at the first look.
        after: the services at the second.
        now_s: wall clock of the second.
    """
    old = {service.service: service for service in before}
    new = {service.service: service for service in after}
    for name in sorted(old.keys() | new.keys()):
        yield from _teachers(name, old.get(name), new.get(name), now_s)
        yield from _students(name, old.get(name), new.get(name), now_s)


def _teachers(name: str, before: ServiceStatus | None, after: ServiceStatus | None, now_s: float) -> Iterator[EventRow]:
    old = {teacher.id: teacher.state for teacher in before.teachers} if before is not None else {}
    new = {teacher.id: teacher.state for teacher in after.teachers} if after is not None else {}
    for teacher in sorted(old.keys() | new.keys()):
        state = new.get(teacher)
        if state == old.get(teacher):
            continue
        if state is None:
            if old[teacher] != "lapsed":  # the registry forgets a lapsed one after a while
                cause = {"draining": _DRAINED, "ready": _LEFT}.get(old[teacher], _GONE)
                yield EventRow(now_s, "leave", "the teacher has left", cause, service=name, node=teacher)
            continue
        kind, text = _KINDS.get(state, state), _TEXTS.get(state, f"the teacher is {state}")
        yield EventRow(now_s, kind, text, _LAPSED if state == "lapsed" else "", service=name, node=teacher)


def _students(name: str, before: ServiceStatus | None, after: ServiceStatus | None, now_s: float) -> Iterator[EventRow]:
    old = {student.id: student for student in before.students} if before is not None else {}
    new = {student.id: student for student in after.students} if after is not None else {}
    for student in sorted(old.keys() ^ new.keys()):
        came = student in new
        job = (new if came else old)[student].job or None
        text = "a student has come" if came else "a student has gone"
        cause = "" if came else _GONE
        yield EventRow(now_s, "join" if came else "leave", text, cause, job=job, service=name, node=student)
