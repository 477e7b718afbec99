"""`edl teachers`: who is live, once or as it changes."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import queue
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from edl.background import BackgroundLoop
from edl.cli._changes import Change, brief_meta, changes, printable, snapshot_as_dict
from edl.cli._store_option import add_store_option
from edl.cli.scaling import load_view
from edl.discovery import open_registry
from edl.discovery.records import check_service
from edl.discovery.registry import Instance, Registry, Snapshot, Watch
from edl.errors import DiscoveryError
from edl.quoting import clip
from edl.settings import DiscoverySettings

__all__ = ["main"]

# How often `--watch` without a service's name looks for new services. Within a service nothing is polled.
_LOOK_FOR_SERVICES_S = 1.0

_MOST_NOTES = 200  # of a teacher's tags and metadata; all of them are in the JSON

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
Registrations that carry nonsense are listed apart, with the reason. Of a single service also what its teachers compute,
what its students ask and how long they wait, and how many teachers would do."""

_EXAMPLES = """\
examples:
  edl teachers                     all services of the default registry (a SQLite file of yours)
  edl teachers digits              one service, with its load: "3 live; 2 students wait 31% of their time; 5 would do"
  edl teachers digits --watch      joins, leaves and changes of one service, as they come
  edl teachers --json | jq .       for programs; with --watch one JSON object a line
  edl teachers --store consul://10.0.0.7:8500"""


def main(argv: Sequence[str]) -> int:
    """Run `edl teachers`."""
    parser = argparse.ArgumentParser(
        prog="edl teachers",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("service", nargs="?", help="show only this service")
    add_store_option(parser, "where teachers register", alias=True)
    parser.add_argument("--watch", action="store_true", help="go on, with a line for each change, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    if options.service is not None:
        check_service(options.service)
    url = DiscoverySettings.of(options.store).url
    if not options.watch and not options.json and _no_file(url):
        print(printable(f"No teacher is registered in {url}: there is no such file."))
        return 0
    with open_registry(url) as registry:
        if options.watch:
            _watch(registry, url, options.service, as_json=options.json)
        else:
            _show(registry, url, options.service, as_json=options.json)
    return 0


def _no_file(url: str) -> bool:
    """Return whether this is a SQLite file that is not there yet. To look should not make it."""
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
        lapsed = frozenset(instance.id for instance in snapshots[0].lapsed)
        view = load_view.look(url, service, len(_ready(snapshots[0])), lapsed)
    if as_json:
        shown = [snapshot_as_dict(snapshot) | (view.as_dict() if view else {}) for snapshot in snapshots]
        print(json.dumps({"discovery": url, "services": shown}))
        return
    console = _console()
    if any(snapshot.instances or snapshot.lapsed for snapshot in snapshots):
        console.print(_table(snapshots))
    else:
        whom = f"of service {service!r} " if service else ""
        console.print(Text(printable(f"No teacher {whom}is registered in {url}.{_others(registry, service)}")))
    for snapshot in snapshots:
        if snapshot.lapsed:
            console.print(Text(printable(_explained(snapshot)), "red"))
        for bad in snapshot.rejected:
            console.print(Text(printable(f"left out: {snapshot.service}/{bad.id}: {bad.reason}"), "magenta"))
        if snapshot.stale:
            console.print(Text(printable(f"{snapshot.service}: as known last; {snapshot.stale}"), "bold red"))
    if view is not None and (view.load is None or view.load.students or view.load.teachers or snapshots[0].instances):
        for part in view.renderables():
            console.print(part)


def _ready(snapshot: Snapshot) -> list[Instance]:
    return [instance for instance in snapshot.instances if instance.state == "ready"]


def _explained(snapshot: Snapshot) -> str:
    return (
        f"{snapshot.service}: lapsed registrations were not renewed in time: the process is dead or paused, or cannot"
        " write to the registry. Students use such a teacher for as long as it answers."
    )


def _others(registry: Registry, service: str | None) -> str:
    """Say which services there are, where the service asked for has no teacher."""
    there = registry.services() if service else ()
    return f" There are teachers of {', '.join(map(repr, there))}." if there else ""


def _console() -> Console:
    # Not a terminal: a line must not be wrapped at a width that nobody has.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 240)


def _table(snapshots: Sequence[Snapshot]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("service", "teacher", "endpoint", "model"):
        table.add_column(heading, overflow="fold")
    table.add_column("capacity", justify="right")
    table.add_column("state")
    table.add_column("tags and metadata", overflow="fold")
    for snapshot in snapshots:
        shown = [(instance, instance.state) for instance in snapshot.instances]
        for instance, state in shown + [(instance, "lapsed") for instance in snapshot.lapsed]:
            notes = " ".join(filter(None, [",".join(instance.tags), brief_meta(instance.meta)]))
            cells = (snapshot.service, instance.id, instance.endpoint, instance.model, f"{instance.capacity:g}")
            style = {"ready": "green", "draining": "yellow"}.get(state, "red")
            table.add_row(
                *(Text(printable(cell)) for cell in cells),
                Text(state, style),
                Text(printable(clip(notes, _MOST_NOTES))),
            )
    return table


def _watch(registry: Registry, url: str, service: str | None, *, as_json: bool) -> None:
    console = _console()
    if not as_json:
        whom = f"service {service!r}" if service else "all services"
        console.print(Text(printable(f"Watching {whom} in {url}; Ctrl-C ends.")))
    # What discovery logs of an outage is told here as a change.
    logging.getLogger("edl.discovery").addHandler(logging.NullHandler())
    known: dict[str, Snapshot] = {}
    for snapshot in _snapshots(registry, service):
        now = time.time()
        for change in changes(known.get(snapshot.service), snapshot):
            if as_json:
                print(json.dumps({"time": round(now, 3), **asdict(change)}), flush=True)
            else:
                _print_change(console, now, change)
        known[snapshot.service] = snapshot


def _print_change(console: Console, now: float, change: Change) -> None:
    sign, style = _STYLES[change.kind]
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    words = {
        "stale": f"the registry does not answer, the list is as known last: {change.detail}",
        "fresh": "the registry answers again",
    }.get(change.kind, f"{change.kind}: {change.detail}")
    name = f"{change.service}/{change.id}" if change.id else change.service
    console.print(Text(printable(f"{clock} {sign} {name} {words}"), style))


def _snapshots(registry: Registry, service: str | None) -> Iterator[Snapshot]:
    """Yield snapshots of a service, or of every service there is or comes to be, as they change."""
    if service:
        with registry.watch(service) as watch:
            yield from watch
        return
    found: queue.SimpleQueue[Snapshot] = queue.SimpleQueue()
    followed: set[str] = set()
    with contextlib.ExitStack() as stack:
        while True:
            for name in _services(registry, followed):
                followed.add(name)
                watch = stack.enter_context(registry.watch(name))
                following = BackgroundLoop("edl-follow-service", partial(_pump, watch, found), watch.close)
                stack.callback(following.close)
            with contextlib.suppress(queue.Empty):
                while True:
                    yield found.get(timeout=_LOOK_FOR_SERVICES_S)


def _pump(watch: Watch, into: queue.SimpleQueue[Snapshot]) -> None:
    """Pass snapshots on until the watch is closed."""
    for snapshot in watch:
        into.put(snapshot)


def _services(registry: Registry, followed: set[str]) -> list[str]:
    """Services not followed yet. The registry may be away for a while; the watches say so."""
    try:
        return [name for name in registry.services() if name not in followed]
    except DiscoveryError:
        if not followed:
            raise
        return []
