"""Every setting that can come from the environment, read here and nowhere else.

An argument wins over the environment, the environment over the default. The ancestor's `PADDLE_DISTILL_*` names are
accepted as aliases, with a `FutureWarning`: whoever sets them need not be who wrote the program, and Python hides a
`DeprecationWarning` from everybody else.
"""

from __future__ import annotations

import numbers
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from edl.errors import SettingsError

__all__ = ["DiscoverySettings", "TeacherSettings", "default_discovery_url", "is_above_zero", "is_count", "is_share"]

T = TypeVar("T")

_ALIASES = {
    "EDL_DISCOVERY": "PADDLE_DISTILL_BALANCE_SERVER",
    "EDL_SERVICE": "PADDLE_DISTILL_SERVICE_NAME",
    "EDL_MAX_TEACHERS": "PADDLE_DISTILL_MAX_TEACHER",
}


def read(name: str, parse: Callable[[str], T], environ: Mapping[str, str] | None = None) -> T | None:
    """The variable `name`, or its old name, parsed; None where neither is set.

    Raises:
        SettingsError: `parse` refused the value with a ValueError.
    """
    environ = os.environ if environ is None else environ
    alias = _ALIASES.get(name, "")
    if name not in environ and alias in environ:
        warnings.warn(f"{alias} is deprecated: set {name} instead", FutureWarning, stacklevel=_outside())
        name = alias
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        return parse(text)
    except ValueError as exc:
        raise SettingsError(f"environment variable {name}={text!r}: {exc}") from exc


def _outside() -> int:
    """The `stacklevel`, in the caller of this, of the first caller outside of EDL."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        level, frame = level + 1, frame.f_back
    return level


def positive_int(text: str) -> int:
    """A whole number above zero."""
    value = int(text)
    if value <= 0:
        raise ValueError("must be above 0")
    return value


def positive_float(text: str) -> float:
    """A finite number above zero."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError("must be a finite number above 0")
    return value


def is_above_zero(value: object) -> bool:
    """Whether an argument is a number above zero, be it infinite; text, arrays and tensors are none."""
    return isinstance(value, numbers.Real) and bool(value > 0)  # type: ignore[operator]


def is_count(value: object) -> bool:
    """Whether an argument is a whole number of at least 1; text, True and 2.0 are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def is_share(value: object) -> bool:
    """Whether an argument is a number from 0 to 1."""
    return isinstance(value, numbers.Real) and bool(0 <= value <= 1)  # type: ignore[operator]


def default_discovery_url() -> str:
    """One SQLite file for all of this user's processes on this machine."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return f"sqlite:///{cache}/edl/discovery.sqlite"


@dataclass(frozen=True)
class DiscoverySettings:
    """Where services register.

    Attributes:
        url: `sqlite:///path/to/file` or `consul://host:8500`. `EDL_DISCOVERY`.
        ttl_s: how long a process may be silent before others see it gone. `EDL_TTL_S`.
    """

    url: str
    ttl_s: float = 10.0

    @classmethod
    def of(
        cls, url: str | None = None, ttl_s: float | None = None, environ: Mapping[str, str] | None = None
    ) -> DiscoverySettings:
        """Arguments over the environment over the default."""
        return cls(
            url=url or read("EDL_DISCOVERY", str, environ) or default_discovery_url(),
            ttl_s=ttl_s or read("EDL_TTL_S", positive_float, environ) or 10.0,
        )


@dataclass(frozen=True)
class TeacherSettings:
    """Which teachers a student looks for, when its code does not say.

    Attributes:
        discovery: the registry's URL, None if only fixed teachers are named. `EDL_DISCOVERY`.
        service: the service that the teachers register under. `EDL_SERVICE`.
        endpoints: fixed teachers, `host:port` each. `EDL_TEACHERS`, separated by commas.
        max_teachers: how many to use at most, None for no limit. `EDL_MAX_TEACHERS`.
    """

    discovery: str | None = None
    service: str | None = None
    endpoints: tuple[str, ...] = ()
    max_teachers: int | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> TeacherSettings:
        """What the environment says."""
        endpoints = read("EDL_TEACHERS", str, environ) or ""
        return cls(
            discovery=read("EDL_DISCOVERY", str, environ),
            service=read("EDL_SERVICE", str, environ),
            endpoints=tuple(part.strip() for part in endpoints.split(",") if part.strip()),
            max_teachers=read("EDL_MAX_TEACHERS", positive_int, environ),
        )
