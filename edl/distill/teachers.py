"""Names a reader's teachers: fixed endpoints, or a service that is followed through discovery."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from edl.discovery.registry import Instance
from edl.distill.transport.priority import Priority, check_priority
from edl.distill.transport.schema import check_version
from edl.errors import SettingsError
from edl.settings import DiscoverySettings, TeacherSettings, is_above_zero, is_count

__all__ = ["Teachers", "fixed_instance", "service_identities", "teachers_from_env"]

logger = logging.getLogger("edl.distill")


@dataclass(frozen=True)
class Teachers:
    """The teachers of a service, or a fixed list of them.

    Attributes:
        service: name under which they register; or
        endpoints: `host:port` of every teacher.
        discovery: URL of the registry; None for `EDL_DISCOVERY`, or this machine's SQLite file.
        max_teachers: talk to so many at most; students of the same service share them out evenly then.
        model: model name in requests; empty for what the teacher registered, or the only model that it serves.
        weight: share in a weighted average with other services.
        version: labels of this version of the model only; empty for any. See "Versions" in docs/students.md.
        priority: with which a Triton is asked that others use as well: "lowest" borrows it from its own clients, with
            few rows and requests at a time; "default" is as they are; a number is that level; "auto" is what the
            server's registration says (`edl register --priority`), else the lowest level where the model has levels.
            See docs/borrowing-triton.md.

    Raises:
        SettingsError: a value that cannot be, or neither or both of a service and endpoints.
    """

    service: str | None = None
    endpoints: tuple[str, ...] = ()
    discovery: str | None = None
    max_teachers: int | None = None
    model: str = ""
    weight: float = 1.0
    version: str = ""
    priority: Priority = "auto"

    def __post_init__(self) -> None:
        check_version(self.version)
        check_priority(self.priority)
        if bool(self.service) == bool(self.endpoints):
            raise SettingsError("name either a service or endpoints of teachers (and not both)")
        if self.max_teachers is not None and not is_count(self.max_teachers):
            raise SettingsError(f"max_teachers={self.max_teachers!r}: must be a whole number of at least 1, or None")
        if not is_above_zero(self.weight) or self.weight == float("inf"):
            raise SettingsError(f"weight={self.weight!r}: must be a finite number above 0")
        for endpoint in self.endpoints:
            fixed_instance(endpoint)

    @classmethod
    def parse(cls, teachers: str | Sequence[str] | Teachers, *, discovery: str | None = None) -> Teachers:
        """Return the teachers that text names.

        Args:
            teachers: a service's name, `host:port[,host:port…]`, a list of `host:port`, or `Teachers`, which are
                returned.
            discovery: URL of the registry.

        Raises:
            SettingsError: it names none.
        """
        if isinstance(teachers, Teachers):
            return teachers
        parts = teachers.split(",") if isinstance(teachers, str) else list(teachers)
        parts = [part.strip() for part in parts if part.strip()]
        if not parts:
            raise SettingsError(f"teachers={teachers!r}: name a service, or host:port of each teacher")
        if len(parts) == 1 and ":" not in parts[0]:
            return cls(service=parts[0], discovery=discovery)
        return cls(endpoints=tuple(parts))

    @property
    def name(self) -> str:
        """Name for titles."""
        return self.service or ", ".join(self.endpoints)

    @property
    def described(self) -> str:
        """Name for messages: with where it is looked up."""
        return f"{self.service!r} in {DiscoverySettings.of(self.discovery).url}" if self.service else self.name


def service_identities(groups: Sequence[Teachers]) -> list[str]:
    """Return by group whose labels they are, in a cache: the service, or all fixed endpoints in one order.

    A registry's URL plays no part, since it has several names, but where an ensemble has two services of the same name.
    """
    names = [group.service or ",".join(sorted(group.endpoints)) for group in groups]
    places = [(name, DiscoverySettings.of(group.discovery).url) for name, group in zip(names, groups, strict=True)]
    return [
        name if len({url for other, url in places if other == name}) == 1 else " in ".join((name, url))
        for name, url in places
    ]


def teachers_from_env(*, optional: bool = False) -> list[Teachers]:
    """Return the teachers that `EDL_TEACHERS`, or `EDL_SERVICE` and `EDL_DISCOVERY`, name.

    Args:
        optional: whether they may name none.

    Raises:
        SettingsError: they name none, unless teachers are optional.
    """
    settings = TeacherSettings.from_env()
    if settings.endpoints:
        return [Teachers(endpoints=settings.endpoints)]
    if settings.service:
        return [Teachers(settings.service, discovery=settings.discovery, max_teachers=settings.max_teachers)]
    if optional:
        return []
    raise SettingsError(
        "no teachers named: call set_dynamic_teacher or set_fixed_teacher, pass teachers=, "
        "or set EDL_SERVICE (with EDL_DISCOVERY) or EDL_TEACHERS in the environment"
    )


def fixed_instance(endpoint: str) -> Instance:
    """Return an endpoint, `host:port` or `unix:` and a path, as an instance.

    Raises:
        SettingsError: it is neither.
    """
    if endpoint.startswith("unix:"):
        return Instance(service="fixed", id=endpoint, address=endpoint, port=0)
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingsError(f"teacher {endpoint!r}: expected host:port, such as 10.0.0.7:8500")
    return Instance(service="fixed", id=endpoint, address=host.strip("[]"), port=int(port))
