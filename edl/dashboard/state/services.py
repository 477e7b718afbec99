"""Services: the registry's teachers joined with the load that teachers and students report.

What does not belong here: what follows from the load (`edl.master.scaling`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from edl.dashboard.state.checks import text
from edl.dashboard.state.masters import decode_wanted
from edl.dashboard.state.schema import ServiceStatus, StudentStatus, TeacherStatus, UnreadableRecord
from edl.discovery.registry import Instance, Registry, Snapshot
from edl.discovery.store import Store
from edl.load_reporting import ServiceLoad, StudentRate, TeacherRate, read_all_wanted, read_services

__all__ = ["ServiceReader"]

_VERSION: Final = "version"
"""Name in a registration's metadata."""

_Wanted = Mapping[tuple[str, str], Mapping[str, Any]]


class ServiceReader:
    """Reads services, their load and what is wanted. Not thread-safe.

    Args:
        store: with the load; stays the caller's to close.
        registry: with the teachers; stays the caller's to close.
    """

    def __init__(self, store: Store, registry: Registry) -> None:
        self._store = store
        self._registry = registry

    def read(self) -> tuple[list[ServiceStatus], _Wanted, list[UnreadableRecord]]:
        """Ask the Store and the registry.

        Returns:
            The services by name; what is wanted, by ("teachers" or "workers", name); what could not be read.

        Raises:
            DiscoveryError: the Store or the registry does not answer.
        """
        wanted = read_all_wanted(self._store)
        loads = read_services(self._store)
        snapshots = {name: self._registry.snapshot(name) for name in self._registry.services()}
        unreadable = [
            UnreadableRecord(f"{service}/{bad.id}", bad.reason)
            for service, snapshot in snapshots.items()
            for bad in snapshot.rejected
        ]
        names = snapshots.keys() | loads.keys() | {name for kind, name in wanted if kind == "teachers"}
        services = [
            _service(name, snapshots.get(name), loads.get(name), wanted.get(("teachers", name)))
            for name in sorted(names)
        ]
        return services, wanted, unreadable


def _service(
    name: str, snapshot: Snapshot | None, load: ServiceLoad | None, wanted: Mapping[str, Any] | None
) -> ServiceStatus:
    students = load.students if load is not None else ()
    asked_by: dict[str, list[str]] = defaultdict(list)
    for student in students:
        for teacher in student.teachers:
            asked_by[teacher].append(student.id)
    rates = {rate.teacher or rate.id: rate for rate in (load.teachers if load is not None else ())}
    teachers = []
    if snapshot is not None:
        for instance in snapshot.instances:
            teachers.append(_registered(instance, instance.state, rates.pop(instance.id, None), asked_by))
        for instance in snapshot.lapsed:
            rate = rates.pop(instance.id, None)
            lapsed = _registered(instance, "lapsed", rate, asked_by)
            teachers.append(replace(lapsed, rows_per_s=None, queue_rows=None, compute_share=None))
    for key in sorted(rates):  # they publish, and are not registered: they start, or the registry is another one
        teachers.append(_unregistered(key, rates[key], asked_by))
    count = decode_wanted(wanted) if wanted is not None else None
    return ServiceStatus(
        service=name,
        teachers=tuple(teachers),
        students=tuple(_student(student) for student in students),
        wanted=count,
    )


def _registered(
    instance: Instance, state: str, rate: TeacherRate | None, asked_by: Mapping[str, list[str]]
) -> TeacherStatus:
    return TeacherStatus(
        id=instance.id,
        endpoint=instance.endpoint,
        model=instance.model or (rate.model if rate is not None else ""),
        version=instance.meta.get(_VERSION, "") or (rate.version if rate is not None else ""),
        state=state,
        students=tuple(asked_by.get(instance.id, ())),
        **_load(rate),
    )


def _unregistered(key: str, rate: TeacherRate, asked_by: Mapping[str, list[str]]) -> TeacherStatus:
    return TeacherStatus(
        id=text(key),
        endpoint=rate.endpoint,
        model=rate.model,
        version=rate.version,
        state=rate.state,
        students=tuple(asked_by.get(key, ())),
        **_load(rate),
    )


def _load(rate: TeacherRate | None) -> dict[str, Any]:
    if rate is None:
        return {}
    return {
        "rows_per_s": rate.rows_per_s,
        "queue_rows": rate.queue_rows,
        "compute_share": rate.compute_share,
        "rows": rate.rows,
        "compute_s": rate.compute_s,
        "workers": rate.workers,
    }


def _student(rate: StudentRate) -> StudentStatus:
    return StudentStatus(
        id=text(rate.id),
        job=text(rate.job),
        rows_per_s=rate.rows_per_s,
        wait_share=rate.wait_share,
        teachers=tuple(rate.teachers),
        rows=rate.rows_asked,
        wait_s=rate.wait_s,
    )
