"""Output about jobs and pools in a cluster: tables for `edl jobs`, and one job or pool in full for `edl status`.

`edl status` joins a job's state in Kubernetes with its agents' reports in a store. Only a store that the user specified
is opened: the author of a job chooses the job's store, and could otherwise steal the token or a file from anyone who
looks at the job. `edl.dashboard.state.cluster` reads the resources.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from edl.cli.kube.logs import FINAL_PHASES
from edl.cli.kube.workloads import Target, find_target, list_pods
from edl.cli.output import age, last_line, printable, show_looks, table
from edl.dashboard.state import as_json
from edl.dashboard.state.cluster import decode_workload
from edl.dashboard.state.jobs import read_job_status
from edl.dashboard.state.reader import shown_url
from edl.dashboard.state.records import text, whole
from edl.dashboard.state.schema import (
    JobStatus,
    KubernetesCondition,
    KubernetesMember,
    KubernetesStatus,
    KubernetesWorkload,
)
from edl.discovery import open_store
from edl.errors import EDLError, SettingsError
from edl.kube.client import KubeClient
from edl.kube.objects import read_time
from edl.kube.resource_types import EVENTS
from edl.quoting import clip, shown
from edl.settings import DiscoverySettings

LAST_EVENTS: Final = 10
"""Maximum number of events that `edl status` shows."""
_EVERY_S: Final = 2.0
"""Refresh interval of `--watch`; each refresh sends three requests."""
_WIDTH: Final = 160
"""Characters per line if the output is not a terminal."""
_STORE_S: Final = 3.0
"""Timeout of a job's store, which may be reachable only from pods."""
_MAX_MESSAGE: Final = 100
"""Maximum length of a message in a table; `edl status` shows the rest."""
_SERVICE: Final = re.compile(r"edl://([a-z][a-z0-9-]*)\.([a-z0-9][a-z0-9-]*)(?:\.svc(?:\.[a-z0-9.-]+)?)?:(\d+)")
"""URL of a store behind a service of the cluster, as in the chart, with only characters that are safe in a command. A
service's name starts with a letter, but an IP address does not."""
_UNSEEN: Final = "no operator has handled it yet: is `edl operator` running for this namespace?"
_GOOD_IF_FALSE: Final = ("Failed", "Suspended")
_STYLES: Final = {
    **dict.fromkeys(("Running", "Succeeded", "ready", "succeeded"), "green"),
    **dict.fromkeys(("Pending", "Suspended", "running", "starting", "unscheduled", "waiting"), "yellow"),
    **dict.fromkeys(("Failed", "Rejected", "failed"), "bold red"),
    **dict.fromkeys(("Deleting", "ending"), "dim"),
}


# --- Tables ---


def cluster_view(status: KubernetesStatus, now_s: float, *, namespaces: bool) -> RenderableType:
    """Return what `edl jobs` shows."""
    parts: list[RenderableType] = [
        workloads_table(items, now_s, namespaces=namespaces) for items in (status.jobs, status.pools) if items
    ]
    if not parts:
        where = "the cluster" if namespaces else f"namespace {', '.join(status.namespaces)!r}"
        parts.append(Text(printable(f"No jobs or pools in {where}; `edl submit` creates one.")))
    if status.more_jobs:
        parts.append(Text(f"and {status.more_jobs:,} jobs that ended earlier", "dim"))
    return Group(*parts)


def workloads_table(items: Sequence[KubernetesWorkload], now_s: float, *, namespaces: bool) -> Table:
    """Return a table of jobs, or of pools."""
    kind = items[0].kind
    members, middle = ("workers", ("progress", "remaining")) if kind == "job" else ("teachers", ("borrowed", "service"))
    headings = [*(["namespace"] if namespaces else []), kind, "phase", members, *middle, "age", "why"]

    def cells(item: KubernetesWorkload) -> list[str | Text]:
        phase = item.phase or "not handled"
        if kind == "job":
            left = "" if item.remaining_s is None or item.ended else f"~{age(item.remaining_s)}"
            extra = ["" if item.progress is None else f"{item.progress}%", left]
        else:
            extra = ["" if item.borrowed is None else str(item.borrowed), item.job_id]
        return [
            *([item.namespace] if namespaces else []),
            Text(printable(item.name), "bold"),
            Text(printable(phase), _STYLES.get(phase, "yellow")),
            _replicas(item),
            *extra,
            age(None if item.created is None else now_s - item.created),
            Text(printable(clip(_why(item), _MAX_MESSAGE)), "dim"),
        ]

    return table(headings, map(cells, items), ("progress", "remaining", "borrowed", "age"))


def _replicas(item: KubernetesWorkload) -> str:
    """Return "ready/wanted (min-max)"."""
    counts = ("-" if count is None else str(count) for count in (item.ready, item.wanted))
    least, most = item.min_replicas, item.max_replicas
    bounds = "" if least is None or most is None else f" ({least})" if least == most else f" ({least}-{most})"
    return "/".join(counts) + bounds


def _why(item: KubernetesWorkload) -> str:
    if not item.phase:
        return _UNSEEN
    failed, refused, growing = (item.condition(kind) for kind in ("Failed", "Accepted", "Growing"))
    if item.phase == "Failed":
        return last_line(failed.message if failed is not None and failed.message else item.message)
    if refused is not None and refused.status == "False" and item.phase != "Succeeded":
        return ": ".join(filter(None, (refused.reason, last_line(refused.message))))  # `clip` keeps the reason
    if item.kind == "pool" and growing is not None and growing.status == "False" and not item.message:
        return last_line(growing.message or growing.reason)
    return last_line(item.message)


# --- One job or pool ---


@dataclass(frozen=True)
class WorkloadEvent:
    """An event recorded by the operator: the wall-clock time of its last occurrence, and how often it occurred."""

    time: float | None
    type: str
    reason: str
    message: str
    count: int


def decode_events(found: Sequence[Mapping[str, Any]]) -> tuple[WorkloadEvent, ...]:
    """Return the last events, oldest first."""
    events = []
    for item in found:
        series: Mapping[str, Any] = item["series"] if isinstance(item.get("series"), Mapping) else {}
        times = (series.get("lastObservedTime"), item.get("lastTimestamp"), item.get("eventTime"))
        moment = next((at for at in map(read_time, times) if at is not None), None)
        count = whole(series.get("count")) or whole(item.get("count")) or 1
        message = text(item.get("message"), 1024)
        events.append(WorkloadEvent(moment, text(item.get("type")), text(item.get("reason")), message, count))
    events.sort(key=lambda event: event.time or 0.0)
    return tuple(events[-LAST_EVENTS:])


def workload_view(
    item: KubernetesWorkload, events: Sequence[WorkloadEvent], now_s: float, logs: str = ""
) -> RenderableType:
    """Return what `edl status` shows for a job or pool; `logs` suggests a command that shows the members' logs."""
    parts: list[RenderableType] = [_headline(item, now_s)]
    failed = item.condition("Failed")
    if item.message and item.phase != "Failed":
        parts.append(Text(printable(last_line(item.message)), "dim"))
    if failed is not None and failed.status == "True":
        lines = [printable(line) for line in (failed.message or item.message or failed.reason).strip("\n").splitlines()]
        parts += [Text("\n".join(lines[:-1]))] if lines[1:] else []
        parts.append(Text(lines[-1] if lines else "", "bold red"))
    if item.conditions:
        parts.append(_conditions(item, now_s))
    elif not item.phase:
        parts.append(Text(_UNSEEN, "yellow"))
    if item.members:
        parts.append(_members(item.members, now_s))
    for event in events:
        clock = "" if event.time is None else time.strftime("%H:%M:%S", time.localtime(event.time))
        times = f" ({event.count} times)" if event.count > 1 else ""
        line = f"{clock:<8}  {event.reason:<18}  {last_line(event.message)}{times}"
        parts.append(Text(printable(line), "yellow" if event.type == "Warning" else ""))
    if logs:
        parts.append(Text(printable(logs), "dim"))
    return Group(*parts)


def _headline(item: KubernetesWorkload, now_s: float) -> Text:
    phase = item.phase or "not handled"
    head = Text.assemble(
        f"{item.kind} ",
        (printable(item.name), "bold"),
        printable(f" in namespace {item.namespace}: "),
        (printable(phase), _STYLES.get(phase, "yellow")),
        f", {'workers' if item.kind == 'job' else 'teachers'} {_replicas(item)}",
    )
    end = item.ended if item.ended is not None else now_s
    facts = (
        (item.kind == "job" and item.job_id, f"id {item.job_id}"),
        (item.kind == "job" and item.progress is not None, f"{item.progress}%"),
        (item.remaining_s is not None and item.ended is None, f"about {age(item.remaining_s)} left"),
        (item.borrowed, f"{item.borrowed} borrowed"),
        (item.scaling == "external", "scaling external"),
        (item.queue, f"queue {item.queue}"),
    )
    for known, words in facts:
        if known:
            head.append(printable(f", {words}"))
    if item.started is not None:
        head.append(f", {'ran' if item.ended is not None else 'runs for'} {age(end - item.started)}")
    elif item.created is not None:
        head.append(f", created {age(now_s - item.created)} ago")
    return head


def _conditions(item: KubernetesWorkload, now_s: float) -> Table:
    def cells(each: KubernetesCondition) -> list[str | Text]:
        good = (each.status == "True") != (each.type in _GOOD_IF_FALSE)
        style = "" if each.status == "Unknown" else "green" if good else "yellow"
        if each.type in ("Accepted", "Failed") and not good and each.status != "Unknown":
            style = "bold red"
        since = "" if each.since is None else age(now_s - each.since)
        return [each.type, Text(printable(each.status), style), since, each.reason, last_line(each.message)]

    return table(("condition", "status", "since", "reason", "why"), map(cells, item.conditions))


def _members(members: Sequence[KubernetesMember], now_s: float) -> Table:
    def cells(item: KubernetesMember) -> list[str | Text]:
        failures = ", ".join(f"{count}x {cause}" for cause, count in item.failures.items())
        if item.memory_factor is not None and item.memory_factor != 1:
            failures += f"; memory x{item.memory_factor:g}"
        state = Text(printable(item.state), _STYLES.get(item.state, ""))
        detail = item.detail
        if item.state == "waiting" and item.not_before is not None and item.not_before > now_s:
            detail = f"next try in {age(item.not_before - now_s)}"
        if detail:
            state.append(f" ({printable(last_line(detail))})", "dim")
        attempt = "" if item.attempt is None else str(item.attempt)
        return [item.name, state, item.node, attempt, failures.removeprefix("; "), _last_end(item, now_s)]

    return table(("member", "state", "node", "try", "failures", "last end"), map(cells, members), ("try",))


def _last_end(item: KubernetesMember, now_s: float) -> str:
    end = item.last_end
    if end is None:
        return ""
    code = "" if end.exit_code is None else f", exit code {end.exit_code}"
    where = f" on {end.node}" if end.node else ""
    when = "" if end.time is None else f", {age(now_s - end.time)} ago"
    words = last_line(end.message)
    return f"{end.cause}{code}{where}{when}{f': {words}' if words else ''}"


# --- Reading the state ---


@dataclass(frozen=True)
class WorkloadLook:
    """The state of a job or pool; `job` is the status in a job's store, `trouble` why it cannot be read."""

    item: KubernetesWorkload
    events: tuple[WorkloadEvent, ...]
    job: JobStatus | None
    trouble: str = ""


def read_workload(client: KubeClient, target: Target, store_url: str = "") -> WorkloadLook:
    """Read a job or pool, its last events, and a job's status from `store_url` or else from the job's own store.

    Raises SettingsError if the resource is gone, and EDLError if the API server fails.
    """
    found = client.get(target.type, target.name)
    uid = found.get("metadata", {}).get("uid") if found is not None else None
    if found is None or uid != target.uid:
        raise SettingsError(f"{target} has been deleted{'' if found is None else ' and recreated'}")
    pods = list_pods(client, target)
    events = client.list(EVENTS, field_selector=f"involvedObject.uid={uid}").items
    item = decode_workload(target.kind, found, pods)
    url = store_url or (found.get("status") or {}).get("store") or (found.get("spec") or {}).get("store")
    job, trouble = None, ""
    if item.kind == "job" and item.job_id and isinstance(url, str) and url:
        job, trouble = _read_store(url, store_url, item.job_id)
    return WorkloadLook(item, decode_events(events), job, trouble)


def _read_store(url: str, named: str, job: str) -> tuple[JobStatus | None, str]:
    """Read a job's store. The store may be unreachable from here, which is not an error in the job."""
    place = f"its agents report to {shown_url(url)}"
    if url not in (named, DiscoverySettings.of().url):
        message = "refusing a store you did not name; pass --store"
        if found := _SERVICE.fullmatch(url):
            service, namespace, port = found.groups()
            forward = f"kubectl port-forward -n {namespace} service/{service} {port}"
            message += f" edl://localhost:{port} while `{forward}` runs"
        return None, f"{place}: {message}"
    try:
        with open_store(url, timeout_s=_STORE_S) as store:
            try:
                return read_job_status(store, job, LAST_EVENTS), ""
            except SettingsError:
                return None, ""  # its agents have not started
    except EDLError as exc:
        return None, f"{place}, which cannot be read from here: {shown(exc)}"


def show_workload(
    client: KubeClient, options: argparse.Namespace, show_job: Callable[[JobStatus], RenderableType]
) -> None:
    """Run `edl status` for a job or pool in a cluster; `show_job` renders the status in a job's store."""
    target = find_target(client, options.job)
    show_looks(
        lambda: read_workload(client, target, options.store or ""),
        lambda look: _shown(look, show_job),
        _json if options.json else None,
        _WIDTH,
        every_s=_EVERY_S if options.watch else None,
        is_over=lambda look: look.item.phase in FINAL_PHASES,
    )


def _json(look: WorkloadLook) -> str:
    job = None if look.job is None else as_json(look.job)
    if job is not None:
        del job["history"]
    fields = as_json(look.item) | {"events": as_json(look.events), "job": job, "trouble": look.trouble}
    return json.dumps(fields, allow_nan=False)


def _shown(look: WorkloadLook, show_job: Callable[[JobStatus], RenderableType]) -> RenderableType:
    item = look.item
    logs = f"edl logs {item.kind}/{item.name} -n {item.namespace} shows its members' output"
    parts = [workload_view(item, look.events, time.time(), logs)]
    if look.job is not None:
        parts += [Text(""), show_job(look.job)]
    if look.trouble:
        parts.append(Text(printable(look.trouble), "yellow"))
    return Group(*parts)
