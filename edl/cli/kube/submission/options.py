"""Values of `edl submit`'s options, each checked, with errors that name the value and what is accepted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from edl.errors import SettingsError

__all__ = ["ReplicaRange", "SubmitOptions", "RequestedPool", "check_name", "parse_environment", "parse_teachers"]

_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_NAME: Final = 52
"""Characters of a job's name: what Kubernetes allows a CronJob, so that whoever makes jobs by one has room left."""


@dataclass(frozen=True)
class ReplicaRange:
    """The least and the most members.

    Attributes:
        least: from 0.
        most: not below `least`.
    """

    least: int
    most: int

    @classmethod
    def parse(cls, spelled: str, option: str, lowest: int) -> ReplicaRange:
        """Read "MIN:MAX", or a number for both.

        Args:
            spelled: by the user.
            option: to name in errors.
            lowest: that the least may be.

        Raises:
            SettingsError: it is something else.
        """
        found = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", spelled)
        if found is None:
            raise SettingsError(f"{option} {spelled!r}: expected a number, or MIN:MAX as in 1:8")
        least = int(found[1])
        most = int(found[2]) if found[2] is not None else least
        if least < lowest or most < max(least, 1):
            raise SettingsError(
                f"{option} {spelled!r}: the first must be at least {lowest}, the second at least 1 and not below it"
            )
        return cls(least, most)


@dataclass(frozen=True)
class RequestedPool:
    """Teachers of a service that a job asks.

    Attributes:
        service: and name of the pool.
        replicas: None to leave a pool that exists as it is.
        serve: what follows `edl serve`; None for a pool that exists.
    """

    service: str
    replicas: ReplicaRange | None
    serve: tuple[str, ...] | None


@dataclass(frozen=True)
class SubmitOptions:
    """What a job is made of.

    Attributes:
        name: of the job.
        run: what follows `edl run`: options of the user's, without script and arguments.
        script: as the user wrote it; with `module` a module's name.
        arguments: of the script.
        module: run `script` as a module, as `python -m` does.
        image: of the workers; empty where the template has it.
        command: how the image starts edl; empty for its own way.
        workers: least and most.
        processes: workers' processes in a pod; None for a process a GPU, or a single one.
        gpus: of a worker's pod.
        cpu: of a worker's pod, as Kubernetes spells it; empty for none.
        memory: likewise.
        environment: variables of the workers, by name.
        store: URL; empty for the operator's.
        checkpoint: URL; empty for none.
        queue: of Kueue; empty for none.
        priority_class: empty for none.
        teachers: of which services.
        teacher_image: empty for the workers'.
        teacher_gpus: of a teacher's pod.
        template: a PodTemplateSpec that every pod begins with.
    """

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    run: tuple[str, ...] = ()
    image: str = ""
    command: tuple[str, ...] = ()
    workers: ReplicaRange = ReplicaRange(1, 1)
    processes: int | None = None
    gpus: int = 0
    cpu: str = ""
    memory: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    store: str = ""
    checkpoint: str = ""
    queue: str = ""
    priority_class: str = ""
    teachers: tuple[RequestedPool, ...] = ()
    teacher_image: str = ""
    teacher_gpus: int = 0
    template: dict[str, object] = field(default_factory=dict)


def check_name(name: str, option: str = "--name") -> str:
    """Return a name that a resource can have.

    Args:
        name: by the user.
        option: to name in errors.

    Raises:
        SettingsError: it cannot be.
    """
    if len(name) > MAX_NAME or not _LABEL.fullmatch(name):
        raise SettingsError(
            f"{option} {name!r}: expected at most {MAX_NAME} of a-z, 0-9 and '-', beginning and ending with a letter "
            "or digit, since Kubernetes names pods after it"
        )
    return name


def parse_environment(given: Iterable[str]) -> dict[str, str]:
    """Read "NAME=VALUE" of several `--env`.

    Args:
        given: by the user.

    Raises:
        SettingsError: an item is something else, or a name comes twice.
    """
    found: dict[str, str] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            raise SettingsError(f"--env {item!r}: expected NAME=VALUE, the name of letters, digits and '_'")
        if name in found:
            raise SettingsError(f"--env {name}=… is given twice: which of them counts cannot be told")
        found[name] = value
    return found


def parse_teachers(teachers: Sequence[str], serve: Sequence[str]) -> tuple[RequestedPool, ...]:
    """Read "SERVICE=MIN:MAX" of several `--teachers`, and "SERVICE=ARGUMENTS" of several `--serve`.

    Args:
        teachers: by the user.
        serve: likewise.

    Raises:
        SettingsError: an item is something else, a service comes twice, or is served and not asked.
    """
    commands: dict[str, tuple[str, ...]] = {}
    for item in serve:
        service, equals, arguments = item.partition("=")
        if not equals or not arguments.strip():
            raise SettingsError(f"--serve {item!r}: expected SERVICE=ARGUMENTS, what follows `edl serve`")
        if service in commands:
            raise SettingsError(f"--serve {service}=… is given twice")
        try:
            commands[service] = tuple(shlex.split(arguments))
        except ValueError as exc:
            raise SettingsError(f"--serve {item!r}: {exc}: quote it as a shell would have it") from exc
    found: list[RequestedPool] = []
    for item in teachers:
        service, equals, spelled = item.partition("=")
        check_name(service, "--teachers")
        if any(demand.service == service for demand in found):
            raise SettingsError(f"--teachers {service} is given twice")
        replicas = ReplicaRange.parse(spelled, f"--teachers {service}=", 0) if equals else None
        arguments_of = commands.pop(service, None)
        if arguments_of is not None and replicas is None:
            raise SettingsError(f"--teachers {service}: say how many, as in --teachers {service}=0:4")
        found.append(RequestedPool(service, replicas, arguments_of))
    if commands:
        name = next(iter(commands))
        raise SettingsError(f"--serve {name}=…: also say how many teachers there may be, --teachers {name}=0:4")
    return tuple(found)
