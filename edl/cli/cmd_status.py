"""`edl status`: who is in a job, what it does, and where its time went; on Kubernetes also what it waits for."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Sequence
from typing import TypeAlias

from rich import box
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from edl.cli import _jobs
from edl.cli._changes import printable
from edl.cli._shards import master_lines
from edl.cli.kube.connection import add_cluster_options, open_cluster
from edl.cli.kube.targets import find_target
from edl.cli.kube.workload_status import show_workload
from edl.collective.goodput.ledger import Event, TimeCategory
from edl.collective.goodput.summary import NodeRow, Summary
from edl.collective.job_records import Exclusion
from edl.dashboard.state import as_json
from edl.dashboard.state.jobs import read_job_status
from edl.dashboard.state.schema import JobStatus
from edl.discovery import Store, open_store
from edl.errors import DiscoveryError, KubernetesError, PermanentError, SettingsError
from edl.settings import DiscoverySettings

__all__ = ["main"]

Look: TypeAlias = "tuple[Summary | None, JobStatus]"

_FALLBACK_S = 3.0
"""For a cluster to answer that the user did not name: it may be one that was switched off long ago."""
_EVERY_S = 1.0
"""Between two looks of `--watch`: agents write what they do as often."""
_MAX_GONE = 5
"""Nodes that have left, of which a line says more; of the others it gives the number."""
_WIDTH = 160
"""Characters where the output is no terminal: a table's row has its events behind it."""

_STYLES = {
    "train": "green",
    "running": "green",
    "done": "green",
    "save": "blue",
    "load": "cyan",
    "rollback": "yellow",
    "rendezvous": "magenta",
    "forming": "magenta",
    "failed": "bold red",
    "lost": "red",
    "down": "bold red",
    "left": "dim",
}

_DESCRIPTION = """\
Shows an elastic job: its members with their ranks, how far and how fast they train, the goodput until now (the part
of the wall-clock time that went into steps which were finished once and not lost), and what happened lately. Of a job
with a master it shows the shards, poisoned ones first. A job that the default store does not know is looked for in the
Kubernetes cluster of the kubeconfig; --kube, --namespace, --context and --kubeconfig look only there. What its agents
report is read where the job says if that is your own EDL_DISCOVERY, and else where --store says."""

_EXAMPLES = """\
examples:
  edl status myjob                          once, from the default store (a SQLite file of yours)
  edl status myjob --watch                  again each second, until the job ends or Ctrl-C
  edl status myjob --json | jq .goodput     for programs; with --watch one JSON object a line
  edl status myjob --store consul://10.0.0.7:8500
  edl status myjob -n research              of a Kubernetes cluster: with conditions, pods, how they ended, and events
  edl status myjob -n research --store consul://10.0.0.7:8500   its agents' reports are there, and you trust that host
  edl status pool/digits --kube             a pool of teachers"""


def main(argv: Sequence[str]) -> int:
    """Run `edl status`."""
    parser = _jobs.parser("status", _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("--events", type=int, default=10, metavar="N", help="show the last N events (default: 10)")
    add("--watch", action="store_true", help="go on, until the job ends or Ctrl-C")
    add("--json", action="store_true", help="print JSON")
    add("--kube", action="store_true", help="of a Kubernetes cluster: NAME, job/NAME or pool/NAME")
    add_cluster_options(parser)
    options = parser.parse_args(argv)
    if options.events < 0:
        raise SettingsError(f"--events {options.events}: must be at least 0")
    if options.kube or options.namespace is not None or options.context or options.kubeconfig:
        with open_cluster(options) as client:
            show_workload(client, options, _jobs.console(_WIDTH), _shown)
        return 0
    with open_store(DiscoverySettings.of(options.store).url) as store:
        try:
            look = read_job_status(store, options.job, options.events)
        except SettingsError as exc:
            if options.store is not None or not _show_from_cluster(options, exc):
                raise
            return 0
        if options.watch:
            _watch(store, look, options.events, as_json=options.json)
        elif options.json:
            print(_json(look))
        else:
            _jobs.console(_WIDTH).print(_shown(look, options.events))
    return 0


def _show_from_cluster(options: argparse.Namespace, missing: SettingsError) -> bool:
    """Look in the cluster of the kubeconfig, if there is any, for a job that no store knows.

    Args:
        options: of the command.
        missing: why the store has nothing.

    Returns:
        Whether there is a cluster that could be asked.

    Raises:
        SettingsError: the cluster does not know the job either.
    """
    with contextlib.ExitStack() as stack:
        try:
            client = stack.enter_context(open_cluster(options, timeout_s=_FALLBACK_S))
        except (ModuleNotFoundError, SettingsError):
            return False
        try:
            find_target(client, options.job)
        except SettingsError as exc:
            raise SettingsError(f"{missing}; in the cluster {exc}") from exc
        except (KubernetesError, PermanentError) as exc:
            raise SettingsError(f"{missing}; and whether the cluster has it is not known: {exc}") from exc
        show_workload(client, options, _jobs.console(_WIDTH), _shown)
    return True


def _json(look: Look) -> str:
    """Return the job's entry of the page's `/api/state`, without its history."""
    fields = as_json(look[1])
    del fields["history"]
    return json.dumps(fields, allow_nan=False)


def _watch(store: Store, look: Look, events: int, *, as_json: bool) -> None:
    """Show the job until it ends. An outage of the store is told, and is not the end."""
    console = _jobs.console(_WIDTH)
    with contextlib.ExitStack() as stack:
        live = None
        if console.is_terminal and not as_json:
            live = stack.enter_context(Live(console=console, auto_refresh=False))
        trouble = ""
        while True:
            if as_json:
                print(_json(look), flush=True)
            else:
                shown = Group(_shown(look, events), Text(printable(trouble), "bold red"))
                if live is None:
                    console.print(shown)
                else:
                    live.update(shown, refresh=True)
            if look[1].state in ("done", "failed"):
                return
            time.sleep(_EVERY_S)
            try:
                look, trouble = read_job_status(store, look[1].job, events), ""
            except DiscoveryError as exc:
                trouble = f"as known last: {exc}"


def _shown(look: Look, events: int) -> RenderableType:
    summary, status = look
    shards = list(master_lines(status.master)) if status.master is not None else []
    if summary is None:
        return Group(Text.assemble("job ", (printable(status.job), "bold"), ": ", _coloured(status.state)), *shards)
    parts: list[RenderableType] = [_headline(summary), *shards]
    if summary.message:
        parts.append(Text(printable(summary.message.strip().rpartition("\n")[2]), "dim"))
    parts += [_where_the_time_went(summary), _members(summary.nodes)]
    parts += [_left_out(exclusion) for exclusion in summary.exclusions]
    if events and summary.events:
        parts.append(_happened(summary.events[-events:]))
    return Group(*parts)


def _headline(summary: Summary) -> Text:
    title = ("job ", (printable(summary.job), "bold"), ": ")
    if summary.generation < 0:
        nodes = "1 node" if len(summary.nodes) == 1 else f"{len(summary.nodes)} nodes"
        return Text.assemble(*title, f"starting, {nodes} so far")
    text = Text.assemble(*title, _coloured(summary.state))
    ranks = "1 rank" if summary.world_size == 1 else f"{summary.world_size} ranks"
    text.append(f", generation {summary.generation}, {ranks}")
    if summary.step >= 0:
        text.append(f", step {summary.step:,}")
    if summary.steps_per_s and summary.state == "running":
        text.append(f", {summary.steps_per_s:.3g} steps/s")
    if summary.samples_per_s and summary.state == "running":
        text.append(f", {summary.samples_per_s:,.0f} samples/s")
    return text


def _where_the_time_went(summary: Summary) -> Text:
    ledger = summary.ledger
    if not summary.steps_known:
        return Text(
            f"goodput unknown: in {_duration(ledger.elapsed_us)} no step was reported (Checkpointer.save reports them)"
        )
    text = Text.assemble((f"goodput {ledger.goodput or 0.0:.1%}", "bold"), f" of {_duration(ledger.elapsed_us)}")
    for state in TimeCategory:
        amount = ledger.amounts[state]
        if amount:
            text.append(" · ").append_text(_coloured(state.name.lower())).append(f" {_duration(amount)}")
    return text


def _members(rows: Sequence[NodeRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("node", overflow="fold")
    table.add_column("ranks")
    table.add_column("state")
    replicas = any(row.replica_age_s is not None for row in rows)
    for heading in ("generation", "step", "steps/s", "samples/s", "heard", *(["replica"] if replicas else [])):
        table.add_column(heading, justify="right")
    gone = [row for row in rows if row.state in ("left", "lost")]
    hidden = gone[_MAX_GONE:]
    for row in rows:
        if row not in hidden:
            table.add_row(*_cells(row)[: len(table.columns)])
    if hidden:
        table.add_row(Text(f"and {len(hidden)} that left or were lost before", "dim"))
    return table


def _left_out(exclusion: Exclusion) -> Text:
    what = f"the host of {printable(exclusion.node)} is left out ({printable(exclusion.reason)}): "
    remedy = "once its GPU is reset or replaced, a reboot or `edl run --readmit` there lets it join again"
    return Text.assemble((what, "bold red"), remedy)


def _cells(row: NodeRow) -> list[Text]:
    record = row.record
    moves = row.state not in ("left", "lost")
    return [
        Text(printable(row.node), "" if moves else "dim"),
        Text("" if row.ranks is None else _ranks(row.ranks)),
        _coloured(row.state),
        Text(str(record.generation) if record.generation >= 0 else ""),
        Text(f"{record.step:,}" if record.step >= 0 else ""),
        Text(f"{record.steps_per_s:.3g}" if moves and record.steps_per_s else ""),
        Text(f"{record.samples_per_s:,.0f}" if moves and record.samples_per_s else ""),
        Text(f"{_duration(round(row.silent_s * 1e6))} ago"),
        Text("" if row.replica_age_s is None else f"{_duration(round(row.replica_age_s * 1e6))} old"),
    ]


def _happened(events: Sequence[Event]) -> RenderableType:
    lines = []
    for event in events:
        clock = time.strftime("%H:%M:%S", time.localtime(event.at_us / 1e6))
        lines.append(Text(printable(f"{clock}  {event.kind:<10}  {event.node}  {event.text}".rstrip())))
    return Group(*lines)


def _coloured(state: str) -> Text:
    return Text(state, _STYLES.get(state, ""))


def _ranks(ranks: range) -> str:
    return str(ranks.start) if len(ranks) == 1 else f"{ranks.start}-{ranks.stop - 1}"


def _duration(amount_us: int) -> str:
    """Return a person's way to say it: 0.35 s, 12 s, 4 min 05 s, 3 h 20 min."""
    seconds = amount_us / 1e6
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
