"""The load of a service, and how many teachers are wanted, as `edl teachers SERVICE` shows it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from edl.cli._changes import printable
from edl.discovery import open_store
from edl.errors import DiscoveryError
from edl.load_reporting import ServiceLoad, read_service, read_wanted
from edl.master.scaling.teacher_demand import describe_load, observe_teachers, required_teachers

__all__ = ["LoadView", "look"]

_STALE_S = 60.0
"""Age from which on a record of what is wanted is called old: an advisor that lives writes every few seconds."""


@dataclass(frozen=True)
class LoadView:
    """What the Store says of a service.

    Attributes:
        load: its load; None if the Store does not answer.
        wanted: how many teachers are wanted; None if no master says.
        live: teachers that are registered and ready.
        trouble: why the Store does not answer; empty if it does.
        lapsed: ids of teachers whose registration lapsed: what they published last says nothing of now.
    """

    load: ServiceLoad | None
    wanted: Mapping[str, Any] | None
    live: int
    trouble: str = ""
    lapsed: frozenset[str] = frozenset()

    @property
    def line(self) -> str:
        """The load in a line: "3 live; 2 students wait 31% of their time; 5 would do"."""
        if self.load is None:
            return f"{self.live} live; what students ask is not known: {self.trouble}"
        return describe_load(self.load, live=self.live)

    def as_dict(self) -> dict[str, Any]:
        """Return the view as JSON shows it."""
        if self.load is None:
            return {"load": None, "wanted": None, "text": self.line, "load_error": self.trouble}
        required = required_teachers(observe_teachers(self.load, 0.0))
        load = {**self.load.as_dict(), "would_do": required}
        load["teachers"] = [
            {**part, "state": "lapsed"} if (part["teacher"] or part["id"]) in self.lapsed else part
            for part in load["teachers"]
        ]
        return {"load": load, "wanted": self.wanted, "text": self.line, "load_error": ""}

    def renderables(self) -> Iterator[RenderableType]:
        """Yield what a person sees: rates of teachers, demands of students, and the line."""
        if self.load is not None and self.load.teachers:
            yield _teachers(self.load, self.lapsed)
        if self.load is not None and self.load.students:
            yield _students(self.load)
        yield Text(printable(self.line), "bold")
        if self.wanted is not None:
            yield Text(printable(_wanted_line(self.wanted)))


def look(url: str, service: str, live: int, lapsed: frozenset[str] = frozenset()) -> LoadView:
    """Read what the Store says of a service. An outage is part of the answer.

    Args:
        url: of the Store.
        service: the service's name.
        live: teachers that are registered and ready.
        lapsed: ids of teachers whose registration lapsed.
    """
    try:
        with open_store(url) as store:
            wanted = read_wanted(store, "teachers", service)
            return LoadView(read_service(store, service), wanted, live, lapsed=lapsed)
    except DiscoveryError as exc:
        return LoadView(None, None, live, str(exc), lapsed)


def _wanted_line(wanted: Mapping[str, Any]) -> str:
    count, reason = int(wanted["count"]), wanted["reason"]
    age_s = time.time() - wanted["time"]
    old = f" {age_s / 60:,.0f} min ago, and no master has said more since" if age_s > _STALE_S else ""
    return f"wanted{old}: {count}; {reason}"


def _teachers(load: ServiceLoad, lapsed: frozenset[str]) -> Table:
    table = _table("teacher", "state")
    for heading in ("rows/s", "could", "busy", "queue"):
        table.add_column(heading, justify="right")
    table.add_column("", overflow="fold")
    for teacher in load.teachers:
        if (teacher.teacher or teacher.id) in lapsed:
            table.add_row(Text(printable(teacher.teacher or teacher.id)), Text("lapsed", "red"), *4 * "-", "")
            continue
        queue = "" if teacher.queue_rows is None else f"{teacher.queue_rows:,}"
        table.add_row(
            Text(printable(teacher.teacher or teacher.id)),
            Text(printable(teacher.state)),
            _number(teacher.rows_per_s),
            _number(teacher.rate),
            _share(teacher.compute_share),
            queue,
            Text(printable(teacher.note), "yellow"),
        )
    return table


def _students(load: ServiceLoad) -> Table:
    table = _table("student", "job")
    for heading in ("asks rows/s", "would ask", "waits", "waits for data"):
        table.add_column(heading, justify="right")
    table.add_column("of teachers", overflow="fold")
    for student in load.students:
        table.add_row(
            Text(printable(student.id)),
            Text(printable(student.job)),
            _number(student.rows_per_s),
            "idle" if student.idle else _number(student.demand),
            _share(student.wait_share),
            _share(student.source_wait_share),
            Text(printable(", ".join(student.teachers))),
        )
    return table


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.2g}"


def _share(value: float | None) -> str:
    return "?" if value is None else f"{value:.0%}"
