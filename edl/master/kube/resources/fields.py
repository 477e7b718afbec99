"""Fields of a JSON object, read with their types checked: what is wrong is collected, not raised.

The API server checks most of it by the schema of the CRD. It is checked again since a cluster may have an older CRD, or
one whose validation was taken out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edl.kube.objects import parse_time
from edl.quoting import shown

__all__ = ["FieldReader", "SpecProblem"]

_MOST_COUNT: Final = 2**31 - 1
"""Of format `int32`."""


@dataclass(frozen=True)
class SpecProblem:
    """Why a resource cannot be worked on.

    Attributes:
        reason: CamelCase, for the condition `Accepted`.
        message: names the value and the remedy.
    """

    reason: str
    message: str


class FieldReader:
    """Reads fields of an object, and collects what is wrong with them.

    Args:
        value: of the object; anything but an object is a problem.
        path: by which messages name it, such as `spec`.
        problems: to which what is wrong is added; None for a list of its own.
    """

    def __init__(self, value: object, path: str, problems: list[SpecProblem] | None = None) -> None:
        self.path = path
        self.problems: list[SpecProblem] = [] if problems is None else problems
        self._fields: Mapping[str, Any] = {}
        if isinstance(value, Mapping):
            self._fields = value
        else:
            self.refuse("InvalidField", "", value, "must be an object")

    def refuse(self, reason: str, name: str, value: object, what: str) -> None:
        """Add a problem."""
        where = f"{self.path}.{name}" if name else self.path
        given = "missing" if value is None else shown(repr(value))
        self.problems.append(SpecProblem(reason, f"{where} is {given}: {what}"))

    def has(self, name: str) -> bool:
        """Whether a field is there, and not null."""
        return self._fields.get(name) is not None

    def open_object(self, name: str) -> FieldReader:
        """Return a reader of an object within this object; a missing object is an empty one."""
        value = self._fields.get(name)
        return FieldReader({} if value is None else value, f"{self.path}.{name}", self.problems)

    def read_object(self, name: str) -> dict[str, Any]:
        """Return an object as it is; a missing object is an empty one."""
        value = self._fields.get(name)
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        self.refuse("InvalidField", name, value, "must be an object")
        return {}

    def read_object_list(self, name: str) -> list[FieldReader]:
        """Return readers of a list of objects; empty where it is missing."""
        value = self._fields.get(name)
        if value is None:
            return []
        if isinstance(value, list):
            path = f"{self.path}.{name}"
            return [FieldReader(part, f"{path}[{number}]", self.problems) for number, part in enumerate(value)]
        self.refuse("InvalidField", name, value, "must be a list of objects")
        return []

    def read_text(self, name: str, default: str = "") -> str:
        """Return a text."""
        value = self._fields.get(name)
        if value is None:
            return default
        if isinstance(value, str):
            return value
        self.refuse("InvalidField", name, value, "must be a string")
        return default

    def read_choice(self, name: str, default: str, choices: Sequence[str]) -> str:
        """Return a text that is one of a few."""
        value = self.read_text(name, default)
        if value in choices:
            return value
        self.refuse("InvalidField", name, value, f"must be {' or '.join(choices)}")
        return default

    def read_flag(self, name: str, default: bool = False) -> bool:
        """Return a truth value."""
        value = self._fields.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        self.refuse("InvalidField", name, value, "must be true or false")
        return default

    def read_count(self, name: str, default: int, least: int = 0, most: int = _MOST_COUNT) -> int:
        """Return a whole number."""
        found = self.read_optional_count(name, least, most)
        return default if found is None else found

    def read_optional_count(self, name: str, least: int = 0, most: int = _MOST_COUNT) -> int | None:
        """Return a whole number; None where it is missing, or is none."""
        value = self._fields.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            bounds = f"{least} or more" if most == _MOST_COUNT else f"{least} to {most}"
            self.refuse("InvalidField", name, value, f"must be a whole number, {bounds}")
            return None
        return value

    def read_texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts; empty where it is missing."""
        value = self._fields.get(name)
        if value is None:
            return ()
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            return tuple(value)
        self.refuse("InvalidField", name, value, 'must be a list of strings; put numbers into quotes, such as "0.1"')
        return ()

    def read_time_s(self, name: str) -> float | None:
        """Return a time of the API (RFC 3339) as seconds since 1970; None where it is missing."""
        value = self._fields.get(name)
        if value is None:
            return None
        try:
            return parse_time(str(value))
        except (ValueError, OverflowError):
            self.refuse("InvalidField", name, value, "must be a time such as 2026-01-31T12:00:00Z")
            return None
