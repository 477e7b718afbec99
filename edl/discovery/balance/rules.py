"""What the members of a balance group write, and how they decide. Pure; `edl.discovery.balance.group` does the I/O.

Keys in the store, below `balance/SERVICE/`:

- `students/STUDENT`, under the student's lease: `{"limit": n}`, the most teachers it talks to.
- `links/STUDENT`, written by the leader: `{"teachers": [id, ...]}`. There is none for a student whose limit all
  teachers fit within: it talks to all of them, and knows that by itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from edl.discovery.balance.assignment import balance
from edl.discovery.keys import MAX_VALUE_BYTES
from edl.discovery.registry import Instance
from edl.discovery.store import Entry
from edl.errors import SettingsError

__all__ = [
    "TeacherChoice",
    "GroupKeys",
    "LinkPlan",
    "choose_teachers",
    "choose_lapsed",
    "pack_limit",
    "pack_links",
    "plan_links",
    "unpack_limit",
    "unpack_links",
]

MAX_ID_BYTES = 100
"""Of a student's id: three times as long once its characters are escaped, it fits into a key of 512 characters."""


@dataclass(frozen=True)
class GroupKeys:
    """The keys of a service's group."""

    service: str

    @property
    def election(self) -> str:
        """Name of the election of the leader."""
        return f"balance/{self.service}"

    @property
    def students(self) -> str:
        """Prefix of the keys under which students list themselves."""
        return f"balance/{self.service}/students/"

    @property
    def links(self) -> str:
        """Prefix of the keys of links."""
        return f"balance/{self.service}/links/"

    def student(self, student: str) -> str:
        """Return the key under which a student lists itself."""
        return self.students + _part(student)

    def links_of(self, student: str) -> str:
        """Return the key of a student's links."""
        return self.links + _part(student)

    def student_in(self, key: str) -> str:
        """Return the student that a key below `students` or `links` belongs to.

        Raises:
            ValueError: it belongs to none.
        """
        student = unquote(key.rpartition("/")[2])
        if key not in (self.student(student), self.links_of(student)):
            raise ValueError("it is not the key of a student")
        return student


def _part(student: str) -> str:
    """Return `student` as a part of a key, whatever characters it has."""
    if not isinstance(student, str) or not 0 < len(student.encode(errors="replace")) <= MAX_ID_BYTES:
        raise SettingsError(f"student_id={student!r:.200}: must be text of 1 to {MAX_ID_BYTES} bytes")
    try:
        return quote(student, safe="").replace(".", "%2E")
    except UnicodeEncodeError as exc:
        raise SettingsError(f"student_id={student!a}: cannot be written as UTF-8") from exc


def pack_limit(limit: int) -> bytes:
    """Return the value of a student's key."""
    return json.dumps({"limit": limit}).encode()


def unpack_limit(value: bytes) -> int:
    """Return the limit in a student's key.

    Raises:
        ValueError: the value makes no sense.
    """
    limit = _field(value, "limit")
    if type(limit) is not int or limit < 1:
        raise ValueError(f"limit {limit!r:.80} is not a whole number above 0")
    return limit


def pack_links(teachers: Iterable[str]) -> bytes:
    """Return the value of a student's links."""
    return json.dumps({"teachers": sorted(teachers)}, separators=(",", ":")).encode()


def unpack_links(value: bytes) -> frozenset[str]:
    """Return the teachers in a student's links.

    Raises:
        ValueError: the value makes no sense.
    """
    teachers = _field(value, "teachers")
    if not isinstance(teachers, list) or not all(isinstance(teacher, str) for teacher in teachers):
        raise ValueError(f"teachers {teachers!r:.80} is not a list of ids")
    return frozenset(teachers)


def _field(value: bytes, name: str) -> Any:
    try:
        fields = json.loads(value)
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc
    if not isinstance(fields, dict) or name not in fields:
        raise ValueError(f"{value!r:.80} has no field {name!r}")
    return fields[name]


# The member


@dataclass(frozen=True)
class TeacherChoice:
    """The teachers that a student talks to.

    Attributes:
        ids: of the teachers.
        coordinated: whether this is what the whole group agreed on, rather than the best that the student can do alone.
    """

    ids: frozenset[str]
    coordinated: bool


def choose_teachers(
    student: str, limit: int, ready: Collection[Instance], links: frozenset[str] | None, last: Collection[str]
) -> TeacherChoice:
    """Decide which of the teachers that are `ready` a student talks to.

    Args:
        student: its name.
        limit: how many teachers it may talk to.
        ready: the teachers that take work.
        links: what the leader gave it; None if that is not known, or may be out of date.
        last: ids of the teachers that it talked to until now.

    Returns:
        At least a teacher if any is ready.
    """
    ids = frozenset(teacher.id for teacher in ready)
    if len(ids) <= limit:
        return TeacherChoice(ids, coordinated=True)
    if links is not None and ids & links:
        return TeacherChoice(ids & links, coordinated=True)
    # Without an answer: keep what there is, and add what differs from student to student, so that they spread. By
    # rendezvous hashing a change of the teachers changes few choices.
    return TeacherChoice(frozenset(_ranked(student, ids, last)[:limit]), coordinated=False)


def choose_lapsed(
    student: str, room: int, lapsed: Iterable[Instance], links: frozenset[str] | None, last: Collection[str]
) -> frozenset[str]:
    """Decide which teachers whose registration lapsed a student tries, where ready teachers leave room.

    Args:
        student: its name.
        room: how many more the student may talk to.
        lapsed: the teachers.
        links: as for `choose_teachers`.
        last: as for `choose_teachers`.
    """
    ranked = _ranked(student, (teacher.id for teacher in lapsed), last)
    ranked.sort(key=lambda name: links is not None and name not in links)
    return frozenset(ranked[: max(room, 0)])


def _ranked(student: str, ids: Iterable[str], last: Collection[str]) -> list[str]:
    """Return `last` first, then in an order of this student's own."""
    ranks = {name: (name not in last, hashlib.blake2b(f"{student}\0{name}".encode()).digest()) for name in ids}
    return sorted(ranks, key=ranks.__getitem__)


# The leader


@dataclass(frozen=True)
class LinkPlan:
    """What the leader is to change.

    Attributes:
        links: the teachers of every student.
        writes: new values by key.
        deletes: keys of links that no student needs.
        refused: entries of the store that make no sense, by key, and why. Such a student gets no links.
    """

    links: Mapping[str, tuple[str, ...]]
    writes: Mapping[str, bytes]
    deletes: tuple[str, ...]
    refused: Mapping[str, str]


def plan_links(
    keys: GroupKeys,
    ready: Collection[Instance],
    students: Iterable[Entry],
    stored: Iterable[Entry],
    remembered: Mapping[str, tuple[str, ...]],
) -> LinkPlan:
    """Balance, and compare with what is in the store.

    Args:
        keys: of the group.
        ready: the teachers that take work.
        students: all entries below `keys.students`.
        stored: all entries below `keys.links`.
        remembered: links that were planned last, for students that have none in the store: they talk to all, or were
            gone for a while.
    """
    limits: dict[str, int] = {}
    present: dict[str, bytes] = {}
    previous: dict[str, Collection[str]] = dict(remembered)
    refused: dict[str, str] = {}
    for entry in students:
        try:
            limits[keys.student_in(entry.key)] = unpack_limit(entry.value)
        except ValueError as exc:
            refused[entry.key] = str(exc)
    for entry in stored:
        present[entry.key] = entry.value
        try:
            previous[keys.student_in(entry.key)] = unpack_links(entry.value)
        except ValueError as exc:
            refused[entry.key] = str(exc)
    most = max(limits.values(), default=1)
    links = balance({teacher.id: teacher.capacity for teacher in ready}, dict(limits), previous, most)
    writes: dict[str, bytes] = {}
    for student, teachers in links.items():
        value = pack_links(teachers)
        if len(value) > MAX_VALUE_BYTES:
            refused[keys.links_of(student)] = f"{len(teachers)} teachers do not fit into one value of the store"
        elif len(ready) > limits[student]:
            writes[keys.links_of(student)] = value
    return LinkPlan(
        links=links,
        writes={key: value for key, value in writes.items() if present.get(key) != value},
        deletes=tuple(sorted(present.keys() - writes.keys())),
        refused=refused,
    )
