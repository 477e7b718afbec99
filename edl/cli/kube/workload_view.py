"""All of a job or pool for a person: its conditions, members, how they ended, and its events. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from edl.cli._changes import printable
from edl.cli.kube.tables import PHASE_STYLES, age, replicas_text
from edl.dashboard.state.checks import text, whole
from edl.dashboard.state.cluster.decoding import decode_time
from edl.dashboard.state.cluster.schema import KubernetesCondition, KubernetesMember, KubernetesWorkload

__all__ = ["WorkloadEvent", "decode_events", "workload_view"]

_MEMBER_STYLES: Final = {
    "ready": "green",
    "succeeded": "green",
    "running": "yellow",
    "starting": "yellow",
    "unscheduled": "yellow",
    "waiting": "yellow",
    "ending": "dim",
    "failed": "bold red",
}
_GOOD_IF_FALSE: Final = ("Failed", "Suspended")


@dataclass(frozen=True)
class WorkloadEvent:
    """An event that the operator recorded.

    Attributes:
        time: wall clock, of the last time.
        type: "Normal" or "Warning".
        reason: a word.
        message: in words.
        count: how often.
    """

    time: float | None
    type: str
    reason: str
    message: str
    count: int


def decode_events(found: Sequence[Mapping[str, Any]], last: int) -> tuple[WorkloadEvent, ...]:
    """Return the last events, oldest first.

    Args:
        found: as the API has them.
        last: how many.
    """
    events = []
    for item in found:
        series: Mapping[str, Any] = item["series"] if isinstance(item.get("series"), Mapping) else {}
        times = (series.get("lastObservedTime"), item.get("lastTimestamp"), item.get("eventTime"))
        moment = next((at for at in map(decode_time, times) if at is not None), None)
        count = whole(series.get("count")) or whole(item.get("count")) or 1
        message = text(item.get("message"), 1024)
        events.append(WorkloadEvent(moment, text(item.get("type")), text(item.get("reason")), message, count))
    events.sort(key=lambda event: event.time or 0.0)
    return tuple(events[-last:] if last else ())


def workload_view(
    item: KubernetesWorkload, events: Sequence[WorkloadEvent], now_s: float, logs: str = ""
) -> RenderableType:
    """Return what `edl status` shows of a job or pool.

    Args:
        item: with its members.
        events: oldest first.
        now_s: wall clock.
        logs: a command that shows the members' logs.
    """
    parts: list[RenderableType] = [_headline(item, now_s)]
    failed = item.condition("Failed")
    if item.message and item.phase != "Failed":
        parts.append(Text(printable(item.message.strip().rpartition("\n")[2]), "dim"))
    if failed is not None and failed.status == "True":
        parts.append(_traceback(failed.message or item.message or failed.reason))
    if item.conditions:
        parts.append(_conditions(item.conditions, now_s))
    elif not item.phase:
        parts.append(Text("no operator has looked at it yet: does `edl operator` run for this namespace?", "yellow"))
    if item.members:
        parts.append(_members(item.members, now_s))
    if events:
        parts.append(_events(events))
    if logs:
        parts.append(Text(printable(logs), "dim"))
    return Group(*parts)


def _headline(item: KubernetesWorkload, now_s: float) -> Text:
    phase = item.phase or "not taken up"
    head = Text.assemble(
        f"{item.kind} ",
        (printable(item.name), "bold"),
        printable(f" in namespace {item.namespace}: "),
        (printable(phase), PHASE_STYLES.get(phase, "yellow")),
    )
    head.append(f", {'workers' if item.kind == 'job' else 'teachers'} {replicas_text(item)}")
    if item.kind == "job" and item.progress is not None:
        head.append(f", {item.progress}%")
    if item.remaining_s is not None and item.ended is None:
        head.append(f", about {age(item.remaining_s)} left")
    if item.borrowed:
        head.append(f", {item.borrowed} borrowed")
    if item.scaling == "external":
        head.append(", scaling external")
    if item.queue:
        head.append(printable(f", queue {item.queue}"))
    if item.started is not None:
        end = item.ended if item.ended is not None else now_s
        head.append(f", {'ran' if item.ended is not None else 'runs for'} {age(end - item.started)}")
    elif item.created is not None:
        head.append(f", made {age(now_s - item.created)} ago")
    return head


def _traceback(message: str) -> Text:
    lines = [printable(line) for line in message.strip("\n").splitlines()]
    shown = Text("\n".join(lines[:-1]) + ("\n" if lines[1:] else ""))
    shown.append(lines[-1] if lines else "", "bold red")
    return shown


def _conditions(conditions: Sequence[KubernetesCondition], now_s: float) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("condition", "status", "since", "reason"):
        table.add_column(heading, no_wrap=heading != "reason")
    table.add_column("why", overflow="fold")
    for item in conditions:
        good = (item.status == "True") != (item.type in _GOOD_IF_FALSE)
        style = "" if item.status == "Unknown" else "green" if good else "yellow"
        if item.type in ("Accepted", "Failed") and not good and item.status != "Unknown":
            style = "bold red"
        since = "" if item.since is None else age(now_s - item.since)
        message = item.message.strip().rpartition("\n")[2]
        cells = [item.type, item.status, since, item.reason, message]
        table.add_row(*(Text(printable(cell), style if place == 1 else "") for place, cell in enumerate(cells)))
    return table


def _members(members: Sequence[KubernetesMember], now_s: float) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("member", "state", "node"):
        table.add_column(heading, overflow="fold")
    table.add_column("try", justify="right")
    table.add_column("failures", overflow="fold")
    table.add_column("last end", overflow="fold")
    for item in members:
        failures = ", ".join(f"{count}x {cause}" for cause, count in item.failures.items())
        if item.memory_factor is not None and item.memory_factor != 1:
            failures += f"; memory x{item.memory_factor:g}"
        state = Text(printable(item.state), _MEMBER_STYLES.get(item.state, ""))
        detail = item.detail
        if item.state == "waiting" and item.not_before is not None and item.not_before > now_s:
            detail = f"next try in {age(item.not_before - now_s)}"
        if detail:
            state.append(f" ({printable(detail)})", "dim")
        cells = [item.node, "" if item.attempt is None else str(item.attempt), failures.removeprefix("; ")]
        table.add_row(Text(printable(item.name)), state, *(Text(printable(cell)) for cell in cells), _end(item, now_s))
    return table


def _end(item: KubernetesMember, now_s: float) -> Text:
    end = item.last_end
    if end is None:
        return Text("")
    code = "" if end.exit_code is None else f", exit code {end.exit_code}"
    where = f" on {end.node}" if end.node else ""
    when = "" if end.time is None else f", {age(now_s - end.time)} ago"
    last_line = end.message.strip().rpartition("\n")[2].strip()
    return Text(printable(f"{end.cause}{code}{where}{when}{f': {last_line}' if last_line else ''}"))


def _events(events: Sequence[WorkloadEvent]) -> RenderableType:
    lines = []
    for event in events:
        clock = "" if event.time is None else time.strftime("%H:%M:%S", time.localtime(event.time))
        times = f" ({event.count} times)" if event.count > 1 else ""
        message = event.message.strip().rpartition("\n")[2]
        style = "yellow" if event.type == "Warning" else ""
        lines.append(Text(printable(f"{clock:<8}  {event.reason:<18}  {message}{times}"), style))
    return Group(*lines)
