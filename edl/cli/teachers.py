"""`edl teachers`: list live teachers, once or as the list changes; for one service also its load."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from edl.cli.output import printable, show_looks, table
from edl.command_line import CommandParser
from edl.discovery import Instance, Registry, Snapshot, open_registry, open_store
from edl.discovery.records import check_service
from edl.errors import DiscoveryError, SettingsError
from edl.load_reporting import ServiceLoad, StudentRate, TeacherRate, read_service, read_wanted
from edl.master.scaling.teachers import TeacherScalingSettings, observe_teachers, required_teachers
from edl.quoting import clip, did_you_mean, listed
from edl.settings import DiscoverySettings

_LOOK_S = 1.0
"""Refresh interval of `--watch`: teachers and students report their load about as often."""
_STALE_S = 60.0
"""Age after which a wanted count is called old: a running advisor writes every few seconds."""
_MOST_META, _MOST_NOTES = 48, 200
"""Characters shown of a teacher's metadata, and of its tags and metadata together; the JSON contains all of them."""
_WIDTH = 240
"""Characters per line if the output is not a terminal."""

_DESCRIPTION = """\
Shows the teachers that are registered: where they are, what they serve, and whether they are ready or draining.
Invalid registrations are listed separately, with the reason. For a single service, it also shows what its teachers
compute, what students ask for and how long they wait, and how many teachers suffice."""

_EXAMPLES = """\
examples:
  edl teachers                     all services in the default registry (your SQLite file)
  edl teachers digits              one service, with its load: "3 live; 2 students wait 31% of their time; 5 would do"
  edl teachers digits --watch      again on each join, leave and change, until Ctrl-C
  edl teachers --json | jq .       for programs; with --watch, one JSON object per line
  edl teachers --store consul://10.0.0.7:8500"""


def main(argv: Sequence[str]) -> int:
    """Run `edl teachers`."""
    parser = CommandParser("edl teachers", _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("service", metavar="SERVICE", nargs="?", help="show only this service")
    parser.add_store_option("where teachers register")
    add("--watch", action="store_true", help="show changes until Ctrl-C")
    add("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    if options.service is not None:
        check_service(options.service)
    url = DiscoverySettings.of(options.store).url
    if not options.watch and not options.json and _no_file(url):
        if options.service is not None:
            raise SettingsError(f"no teacher of {options.service!r} is registered in {url}: there is no such file")
        print(printable(f"No teacher is registered in {url}: there is no such file."))
        return 0
    with open_registry(url) as registry:

        def read() -> _Look:
            names = (options.service,) if options.service else registry.services()
            found = _Look(url, tuple(registry.snapshot(name) for name in names))
            if options.service is None:
                return found
            try:
                view = look(url, found.snapshots[0])
            except DiscoveryError as exc:  # a Consul token may allow reading services, but not the KV store
                return replace(found, trouble=f"the load of students is unknown: {exc}")
            if not options.watch:
                _refuse_unknown(registry, url, found.snapshots[0], view)
            return replace(found, view=view)

        show_looks(
            read,
            _show,
            _json if options.json else None,
            _WIDTH,
            every_s=_LOOK_S if options.watch else None,
            facts=lambda found: found.snapshots,
        )
    return 0


@dataclass(frozen=True)
class _Look:
    """What is registered at `url`; `view` is a single service's load, `trouble` says why the load is unknown."""

    url: str
    snapshots: tuple[Snapshot, ...]
    view: LoadView | None = None
    trouble: str = ""


def _no_file(url: str) -> bool:
    """Return whether `url` refers to a SQLite file that does not exist yet: a mere look should not create the file."""
    parts = urlsplit(url)
    try:
        return parts.scheme == "sqlite" and not Path(unquote(parts.path)).stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False  # opening it says why


def _json(found: _Look) -> str:
    load: dict[str, Any] = {"load": None, "load_error": found.trouble} if found.trouble else {}
    load |= found.view.as_dict() if found.view is not None else {}
    shown = [_snapshot_as_dict(snapshot) | load for snapshot in found.snapshots]
    return json.dumps({"discovery": found.url, "services": shown})


def _show(found: _Look) -> RenderableType:
    parts: list[RenderableType] = []
    if any(snapshot.instances or snapshot.lapsed for snapshot in found.snapshots):
        parts.append(_teachers(found.snapshots))
    else:
        whom = f"of service {found.snapshots[0].service!r} " if found.view is not None or found.trouble else ""
        parts.append(Text(printable(f"No teacher {whom}is registered in {found.url}.")))
    for snapshot in found.snapshots:
        if snapshot.lapsed:
            words = (
                f"{snapshot.service}: lapsed registrations were not renewed in time: the process is dead or paused, or "
                "cannot write to the registry. Students use such a teacher as long as it responds."
            )
            parts.append(Text(printable(words), "red"))
        for bad in snapshot.rejected:
            parts.append(Text(printable(f"left out: {snapshot.service}/{bad.id}: {bad.reason}"), "magenta"))
    view = found.view
    if view is not None and (view.load.students or view.load.teachers or found.snapshots[0].instances):
        parts += view.renderables()
    if found.trouble:
        parts.append(Text(printable(found.trouble), "bold red"))
    return Group(*parts)


def _refuse_unknown(registry: Registry, url: str, snapshot: Snapshot, view: LoadView) -> None:
    """Raise SettingsError for a service that the store has no record of: its name was probably mistyped."""
    if snapshot.instances or snapshot.lapsed or snapshot.rejected or view.wanted is not None:
        return
    if view.load.students or view.load.teachers:
        return
    there = registry.services()
    others = f"; there are teachers of {listed(there)}" if there else "; there are no teachers of other services"
    near = did_you_mean(snapshot.service, there)
    raise SettingsError(f"no teacher of {snapshot.service!r} is registered in {url}{near or others}")


def _teachers(snapshots: Sequence[Snapshot]) -> Table:
    rows = []
    for snapshot in snapshots:
        shown = [(instance, instance.state) for instance in snapshot.instances]
        for instance, state in shown + [(instance, "lapsed") for instance in snapshot.lapsed]:
            notes = clip(" ".join(filter(None, [",".join(instance.tags), brief_meta(instance.meta)])), _MOST_NOTES)
            style = {"ready": "green", "draining": "yellow"}.get(state, "red")
            where = (snapshot.service, instance.id, instance.endpoint, instance.model)
            rows.append((*where, f"{instance.capacity:g}", Text(state, style), notes))
    headings = ("service", "teacher", "endpoint", "model", "capacity", "state", "tags and metadata")
    return table(headings, rows, ("capacity",))


def _snapshot_as_dict(snapshot: Snapshot) -> dict[str, Any]:
    def as_dict(instance: Instance) -> dict[str, Any]:
        return {**asdict(instance), "meta": dict(instance.meta), "endpoint": instance.endpoint}

    return {
        "service": snapshot.service,
        "instances": [as_dict(instance) for instance in snapshot.instances],
        "lapsed": [as_dict(instance) for instance in snapshot.lapsed],
        "rejected": [asdict(bad) for bad in snapshot.rejected],
    }


def brief_meta(meta: Any) -> str:
    """Return metadata as `key=value key=value`, shortened and without `boot`, which only programs need."""
    in_order = sorted(meta.items(), key=lambda item: (item[0] != "version", item[0]))
    text = " ".join(f"{key}={value}" for key, value in in_order if key != "boot")
    return text if len(text) <= _MOST_META else text[: _MOST_META - 1] + "…"


# --- Load ---


@dataclass(frozen=True)
class LoadView:
    """A service's load, with the number of `live` teachers; `wanted` is None if no master decides the number.

    Numbers from teachers whose registration `lapsed` are out of date.
    """

    load: ServiceLoad
    wanted: Mapping[str, Any] | None
    live: int
    lapsed: frozenset[str] = frozenset()

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON output."""
        load = {**self.load.as_dict(), "would_do": required_teachers(observe_teachers(self.load, 0.0))}
        load["teachers"] = [
            {**part, "state": "lapsed"} if (part["teacher"] or part["id"]) in self.lapsed else part
            for part in load["teachers"]
        ]
        return {"load": load, "wanted": self.wanted, "text": _describe_load(self.load, self.live)}

    def renderables(self) -> Iterator[RenderableType]:
        """Yield the tables of teachers and students, and the summary lines."""
        if self.load.teachers:
            yield _teachers_load(self.load, self.lapsed)
        if self.load.students:
            yield _students_load(self.load)
        yield Text(printable(_describe_load(self.load, self.live)), "bold")
        if self.wanted is not None:
            yield Text(printable(_wanted_line(self.wanted)))


def look(url: str, snapshot: Snapshot) -> LoadView:
    """Read a service's load from the Store."""
    ready = sum(instance.state == "ready" for instance in snapshot.instances)
    lapsed = frozenset(instance.id for instance in snapshot.lapsed)
    with open_store(url) as store:
        wanted = read_wanted(store, "teachers", snapshot.service)
        return LoadView(read_service(store, snapshot.service), wanted, ready, lapsed)


def _describe_load(load: ServiceLoad, live: int) -> str:
    parts = [f"{live} live" + (f", {load.starting} starting" if load.starting else "")]
    active, share = load.waiting, load.wait_share
    if active and share is not None:
        students = "1 student waits" if len(active) == 1 else f"{len(active)} students wait"
        parts.append(f"{students} {share:.0%} of {'its' if len(active) == 1 else 'their'} time")
    elif load.students:
        parts.append("1 student asks for nothing" if len(load.students) == 1 else "no student asks for anything")
    else:
        parts.append("no student publishes its load")
    observation = observe_teachers(load, 0.0)
    required = required_teachers(observation)
    if required is None:
        why = "no teacher's rate is known yet" if observation.demand else "no student could ask for anything yet"
        parts.append(f"how many would do is unknown: {why}")
    elif observation.demand:
        at_least = observation.least_busy_share < TeacherScalingSettings().least_busy_share
        parts.append(f"{required} or more would do" if at_least else f"{required} would do")
    return "; ".join(parts)


def _wanted_line(wanted: Mapping[str, Any]) -> str:
    count, reason = int(wanted["count"]), wanted["reason"]
    age_s = time.time() - wanted["time"]
    old = f" {age_s / 60:,.0f} min ago, with no update from a master since" if age_s > _STALE_S else ""
    return f"wanted{old}: {count}; {reason}"


def _teachers_load(load: ServiceLoad, lapsed: frozenset[str]) -> Table:
    numbers = ("rows/s", "could", "busy", "queue")

    def cells(teacher: TeacherRate) -> list[str | Text]:
        name = teacher.teacher or teacher.id
        if name in lapsed:
            return [name, Text("lapsed", "red"), *4 * "-", ""]
        queue = "" if teacher.queue_rows is None else f"{teacher.queue_rows:,}"
        rates = _number(teacher.rows_per_s), _number(teacher.rate), _share(teacher.compute_share)
        return [name, teacher.state, *rates, queue, Text(printable(teacher.note), "yellow")]

    return table(("teacher", "state", *numbers, ""), map(cells, load.teachers), numbers)


def _students_load(load: ServiceLoad) -> Table:
    numbers = ("asks rows/s", "would ask", "waits", "waits for data")

    def cells(student: StudentRate) -> list[str]:
        rates = _number(student.rows_per_s), "idle" if student.idle else _number(student.demand)
        shares = _share(student.wait_share), _share(student.source_wait_share)
        return [student.id, student.job, *rates, *shares, ", ".join(student.teachers)]

    return table(("student", "job", *numbers, "of teachers"), map(cells, load.students), numbers)


def _number(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.2g}"


def _share(value: float | None) -> str:
    return "?" if value is None else f"{value:.0%}"
