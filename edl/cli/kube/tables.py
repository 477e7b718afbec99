"""Jobs and pools as tables, and what they consist of as lines. Pure: rows in, what rich prints out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich import box
from rich.table import Table
from rich.text import Text

from edl.cli._changes import printable
from edl.dashboard.state.cluster.schema import KubernetesWorkload
from edl.quoting import clip

__all__ = ["PHASE_STYLES", "age", "jobs_table", "pools_table", "replicas_text"]

PHASE_STYLES: Final = {
    "Running": "green",
    "Succeeded": "green",
    "Pending": "yellow",
    "Suspended": "yellow",
    "Deleting": "dim",
    "Failed": "bold red",
    "Rejected": "bold red",
}
_UNKNOWN: Final = "-"
_MAX_MESSAGE: Final = 100
"""Characters of a message in a row: the rest is in `edl status`."""


def jobs_table(jobs: Sequence[KubernetesWorkload], now_s: float, *, namespaces: bool) -> Table:
    """Return a row for a job.

    Args:
        jobs: in the order to show.
        now_s: wall clock.
        namespaces: show them.
    """
    table = _table(namespaces, "job", "workers", ("progress", "remaining"))
    for job in jobs:
        remaining = "" if job.remaining_s is None or job.ended else f"~{age(job.remaining_s)}"
        progress = "" if job.progress is None else f"{job.progress}%"
        table.add_row(*_cells(job, now_s, namespaces, [progress, remaining]))
    return table


def pools_table(pools: Sequence[KubernetesWorkload], now_s: float, *, namespaces: bool) -> Table:
    """Return a row for a pool.

    Args:
        pools: in the order to show.
        now_s: wall clock.
        namespaces: show them.
    """
    table = _table(namespaces, "pool", "teachers", ("borrowed", "service"))
    for pool in pools:
        borrowed = "" if pool.borrowed is None else str(pool.borrowed)
        table.add_row(*_cells(pool, now_s, namespaces, [borrowed, pool.job_id]))
    return table


def replicas_text(item: KubernetesWorkload) -> str:
    """Return "ready/wanted (min-max)".

    Args:
        item: a job or pool.
    """
    counts = (_UNKNOWN if count is None else str(count) for count in (item.ready, item.wanted))
    least, most = item.min_replicas, item.max_replicas
    bounds = "" if least is None or most is None else f" ({least})" if least == most else f" ({least}-{most})"
    return "/".join(counts) + bounds


def age(seconds: float | None) -> str:
    """Return a duration as kubectl has it: 45s, 3m20s, 2h5m, 4d3h.

    Args:
        seconds: None for what is not known.
    """
    if seconds is None:
        return _UNKNOWN
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 10:
        return f"{minutes}m{rest}s" if rest else f"{minutes}m"
    if minutes < 120:
        return f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{minutes}m" if minutes else f"{hours}h"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours}h" if hours and days < 8 else f"{days}d"


def _table(namespaces: bool, noun: str, members: str, numbers: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    if namespaces:
        table.add_column("namespace", overflow="fold")
    table.add_column(noun, overflow="fold")
    table.add_column("phase", no_wrap=True)
    table.add_column(members, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="left" if heading == "service" else "right", overflow="fold")
    table.add_column("age", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    return table


def _cells(item: KubernetesWorkload, now_s: float, namespaces: bool, middle: Sequence[str]) -> list[Text]:
    phase = item.phase or "not taken up"
    since = None if item.created is None else now_s - item.created
    return [
        *([Text(printable(item.namespace))] if namespaces else []),
        Text(printable(item.name), "bold"),
        Text(printable(phase), PHASE_STYLES.get(phase, "yellow")),
        Text(replicas_text(item)),
        *(Text(printable(cell)) for cell in middle),
        Text(age(since)),
        Text(printable(clip(_why(item), _MAX_MESSAGE)), "dim"),
    ]


def _why(item: KubernetesWorkload) -> str:
    """Return the last line of what explains the phase: a traceback ends with the error."""
    if not item.phase:
        return "no operator has looked at it yet: is `edl operator` running for this namespace?"
    if item.phase == "Failed":
        failed = item.condition("Failed")
        return _last_line(failed.message if failed is not None and failed.message else item.message)
    refused = item.condition("Accepted")
    if refused is not None and refused.status == "False" and item.phase != "Succeeded":
        return _last_line(refused.message or refused.reason)
    growing = item.condition("Growing")
    if item.kind == "pool" and growing is not None and growing.status == "False" and not item.message:
        return _last_line(growing.message or growing.reason)
    return _last_line(item.message)


def _last_line(message: str) -> str:
    return message.strip().rpartition("\n")[2].strip()
