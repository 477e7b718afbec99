"""`edl teachers`: list live teachers, once or as the list changes; for one service also its load."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from edl.cli.output import console, printable, table
from edl.command_line import CommandParser
from edl.discovery import open_registry, open_store
from edl.discovery.records import check_service
from edl.discovery.registry import Instance, Registry, Snapshot
from edl.errors import DiscoveryError, SettingsError
from edl.load_reporting import ServiceLoad, StudentRate, TeacherRate, read_service, read_wanted
from edl.master.scaling.teachers import TeacherScalingSettings, observe_teachers, required_teachers
from edl.quoting import clip, did_you_mean, listed
from edl.settings import DiscoverySettings

_LOOK_S = 1.0
"""Poll interval of `--watch` for all services; a single service is watched instead."""
_STALE_S = 60.0
"""Age from which a wanted count is called old: a running advisor writes every few seconds."""
_MOST_META, _MOST_NOTES = 48, 200
"""Characters of a teacher's metadata, and of its tags and metadata; all of them are in the JSON."""
_WIDTH = 240
"""Characters of a line if the output is not a terminal."""
_STYLES = {
    "joined": ("+", "green"),
    "left": ("-", "red"),
    "lapsed": ("-", "red"),
    "changed": ("~", "yellow"),
    "rejected": ("!", "magenta"),
    "stale": ("?", "bold red"),
    "fresh": ("=", "green"),
}

_DESCRIPTION = """\
Shows the teachers that are registered: where they are, what they serve, and whether they are ready or draining.
Invalid registrations are listed separately, with the reason. For a single service it also shows what its teachers
compute, what students ask for, how long they wait, and how many teachers suffice."""

_EXAMPLES = """\
examples:
  edl teachers                     all services in the default registry (your SQLite file)
  edl teachers digits              one service, with its load: "3 live; 2 students wait 31% of their time; 5 would do"
  edl teachers digits --watch      a line for each join, leave and change of one service
  edl teachers --json | jq .       for programs; --watch: one JSON object per line
  edl teachers --store consul://10.0.0.7:8500"""


def main(argv: Sequence[str]) -> int:
    """Run `edl teachers`."""
    parser = CommandParser("edl teachers", _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("service", metavar="SERVICE", nargs="?", help="show only this service")
    parser.add_store_option("where teachers register")
    add("--watch", action="store_true", help="print a line for each change, until Ctrl-C")
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
        if options.watch:
            _watch(registry, url, options.service, as_json=options.json)
        else:
            _show(registry, url, options.service, as_json=options.json)
    return 0


def _no_file(url: str) -> bool:
    """Return whether this is a SQLite file that does not exist yet: looking should not create it."""
    parts = urlsplit(url)
    try:
        return parts.scheme == "sqlite" and not Path(unquote(parts.path)).stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False  # opening it says why


def _show(registry: Registry, url: str, service: str | None, *, as_json: bool) -> None:
    services = (service,) if service else registry.services()
    snapshots = [registry.snapshot(name) for name in services]
    view = None
    if service:
        ready = sum(instance.state == "ready" for instance in snapshots[0].instances)
        view = look(url, service, ready, frozenset(instance.id for instance in snapshots[0].lapsed))
        _refuse_unknown(registry, url, snapshots[0], view)
    if as_json:
        shown = [_snapshot_as_dict(snapshot) | (view.as_dict() if view else {}) for snapshot in snapshots]
        print(json.dumps({"discovery": url, "services": shown}))
        return
    screen = console(_WIDTH)
    if any(snapshot.instances or snapshot.lapsed for snapshot in snapshots):
        screen.print(_teachers(snapshots))
    else:
        whom = f"of service {service!r} " if service else ""
        screen.print(Text(printable(f"No teacher {whom}is registered in {url}.")))
    for snapshot in snapshots:
        if snapshot.lapsed:
            words = (
                f"{snapshot.service}: lapsed registrations were not renewed in time: the process is dead or paused, or "
                "cannot write to the registry. Students use such a teacher as long as it responds."
            )
            screen.print(Text(printable(words), "red"))
        for bad in snapshot.rejected:
            screen.print(Text(printable(f"left out: {snapshot.service}/{bad.id}: {bad.reason}"), "magenta"))
        if snapshot.stale:
            screen.print(Text(printable(f"{snapshot.service}: last known state; {snapshot.stale}"), "bold red"))
    if view is not None and (view.load is None or view.load.students or view.load.teachers or snapshots[0].instances):
        for part in view.renderables():
            screen.print(part)


def _refuse_unknown(registry: Registry, url: str, snapshot: Snapshot, view: LoadView) -> None:
    """Raise SettingsError for a service that the store has no record of: its name was probably mistyped."""
    load = view.load
    if snapshot.instances or snapshot.lapsed or snapshot.rejected or snapshot.stale or view.wanted is not None:
        return
    if load is None or load.students or load.teachers:
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
        "stale": snapshot.stale,
        "instances": [as_dict(instance) for instance in snapshot.instances],
        "lapsed": [as_dict(instance) for instance in snapshot.lapsed],
        "rejected": [asdict(bad) for bad in snapshot.rejected],
    }


# --- Changes ---


def _watch(registry: Registry, url: str, service: str | None, *, as_json: bool) -> None:
    screen = console(_WIDTH)
    if not as_json:
        whom = f"service {service!r}" if service else "all services"
        screen.print(Text(printable(f"Watching {whom} in {url}; Ctrl-C ends.")))
    # An outage is printed here as a change, so discovery need not log it.
    logging.getLogger("edl.discovery").addHandler(logging.NullHandler())
    known: dict[str, Snapshot] = {}
    for snapshot in _snapshots(registry, service):
        now = time.time()
        for change in changes(known.get(snapshot.service), snapshot):
            if as_json:
                print(json.dumps({"time": round(now, 3), **asdict(change)}), flush=True)
            else:
                _print_change(screen, now, change)
        known[snapshot.service] = snapshot


def _print_change(screen: Console, now: float, change: Change) -> None:
    sign, style = _STYLES[change.kind]
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    words = {
        "stale": f"the registry does not respond; showing the last known list: {change.detail}",
        "fresh": "the registry responds again",
    }.get(change.kind, f"{change.kind}: {change.detail}")
    name = f"{change.service}/{change.id}" if change.id else change.service
    screen.print(Text(printable(f"{clock} {sign} {name} {words}"), style))


def _snapshots(registry: Registry, service: str | None) -> Iterator[Snapshot]:
    """Yield snapshots of a service, or of all current and future services, as they change."""
    if service:
        with registry.watch(service) as watch:
            yield from watch
        return
    known: dict[str, Snapshot] = {}
    while True:
        try:
            for name in sorted({*registry.services(), *known}):
                known[name] = registry.snapshot(name)
            yield from known.values()
        except DiscoveryError as exc:  # it may be down for a while
            if not known:
                raise
            yield from (replace(snapshot, stale=str(exc)) for snapshot in known.values())
        time.sleep(_LOOK_S)


@dataclass(frozen=True)
class Change:
    """A change of a teacher or, if `id` is empty, of the registry itself."""

    kind: Literal["joined", "left", "lapsed", "changed", "rejected", "stale", "fresh"]
    service: str
    id: str = ""
    detail: str = ""


def changes(before: Snapshot | None, after: Snapshot) -> Iterator[Change]:
    """Yield the changes from `before` (None: nothing known) to `after`, by id. During an outage none seems to leave."""
    service = after.service
    old = {instance.id: instance for instance in before.instances} if before else {}
    new = {instance.id: instance for instance in after.instances}
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            lapsed = any(instance.id == name for instance in after.lapsed)
            yield Change("lapsed" if lapsed else "left", service, name, old[name].endpoint)
        elif name not in old:
            yield Change("joined", service, name, _introduction(new[name]))
        elif difference := _difference(old[name], new[name]):
            yield Change("changed", service, name, difference)
    known = {(bad.id, bad.reason) for bad in before.rejected} if before else set()
    for bad in after.rejected:
        if (bad.id, bad.reason) not in known:
            yield Change("rejected", service, bad.id, bad.reason)
    was_stale = before.stale if before else ""
    if after.stale and not was_stale:
        yield Change("stale", service, detail=after.stale)
    elif was_stale and not after.stale:
        yield Change("fresh", service)


def _introduction(instance: Instance) -> str:
    words = [instance.endpoint]
    if instance.model:
        words.append(f"model {instance.model}")
    words.append(f"capacity {instance.capacity:g}")
    if instance.state != "ready":
        words.append(instance.state)
    return ", ".join(words)


def _difference(old: Instance, new: Instance) -> str:
    words = []
    if old.state != new.state:
        words.append(f"{old.state} -> {new.state}")
    for name in ("endpoint", "model", "capacity", "tags", "meta"):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            words.append(f"{name} {_value(before)} -> {_value(after)}")
    return ", ".join(words)


def _value(value: object) -> str:
    if isinstance(value, dict):
        return brief_meta(value)
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def brief_meta(meta: Any) -> str:
    """Return metadata as `key=value key=value`, cut, without `boot`, which only programs need."""
    in_order = sorted(meta.items(), key=lambda item: (item[0] != "version", item[0]))
    text = " ".join(f"{key}={value}" for key, value in in_order if key != "boot")
    return text if len(text) <= _MOST_META else text[: _MOST_META - 1] + "…"


# --- Load ---


@dataclass(frozen=True)
class LoadView:
    """A service's load, as read from the Store.

    `load` is None if the Store does not respond, and `trouble` says why; `wanted` is None if no master decides. Numbers
    from teachers whose registration `lapsed` are out of date.
    """

    load: ServiceLoad | None
    wanted: Mapping[str, Any] | None
    live: int
    trouble: str = ""
    lapsed: frozenset[str] = frozenset()

    @property
    def line(self) -> str:
        """The load in one line: "3 live; 2 students wait 31% of their time; 5 would do"."""
        if self.load is None:
            return f"{self.live} live; the load of students is unknown: {self.trouble}"
        return _describe_load(self.load, self.live)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON output."""
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
        """Yield the tables of teachers and students, and the summary lines."""
        if self.load is not None and self.load.teachers:
            yield _teachers_load(self.load, self.lapsed)
        if self.load is not None and self.load.students:
            yield _students_load(self.load)
        yield Text(printable(self.line), "bold")
        if self.wanted is not None:
            yield Text(printable(_wanted_line(self.wanted)))


def look(url: str, service: str, live: int, lapsed: frozenset[str] = frozenset()) -> LoadView:
    """Read a service's load from the Store. An outage is part of the result, not an error."""
    try:
        with open_store(url) as store:
            wanted = read_wanted(store, "teachers", service)
            return LoadView(read_service(store, service), wanted, live, lapsed=lapsed)
    except DiscoveryError as exc:
        return LoadView(None, None, live, str(exc), lapsed)


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
