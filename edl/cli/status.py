"""`edl status`: show a job's members, state and lost time; on Kubernetes, also what the job waits for."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from edl.cli.kube.workload_status import LAST_EVENTS, show_workload
from edl.cli.kube.workloads import add_cluster_options, find_target, open_cluster
from edl.cli.output import counted, last_line, printable, show_looks, table
from edl.collective.goodput import Event, NodeStatus
from edl.collective.job_records import GAVE_UP, Exclusion
from edl.command_line import CommandParser
from edl.dashboard.state import as_json
from edl.dashboard.state.jobs import JobReader, read_all_jobs, read_job_status
from edl.dashboard.state.schema import DatasetStatus, JobStatus, MasterStatus, PoisonedShard, UnreadableRecord
from edl.discovery import Store, open_store
from edl.errors import KubernetesError, PermanentError, ProtocolError, SettingsError
from edl.master.kube.operator.owner_keys import delete_job_keys
from edl.settings import DiscoverySettings

_MOST_POISONED = 5
"""Maximum number of shards listed with their reason; the others are only counted."""


def master_lines(master: MasterStatus) -> Iterator[Text]:
    """Yield lines about a master: state, endpoint, and data sets (poisoned first), with the reasons for failures."""
    term = f", term {master.term}" if master.term is not None else ""
    where = f" at {printable(master.endpoint)}" if master.endpoint else ""
    age = f", last heard {master.age_s:.0f} s ago" if master.state == "silent" and master.age_s is not None else ""
    style = "" if master.state in ("leading", "done") else "bold red"
    yield Text.assemble("master ", (printable(master.state or "unknown"), style), f"{where}{term}{age}")
    for dataset in master.datasets:
        yield _counts(dataset)
        poisoned = dataset.shards["poisoned"]
        for shard in dataset.poisoned[:_MOST_POISONED]:
            yield Text(f"  {_poisoned(shard)}", "red")
        hidden = poisoned - min(len(dataset.poisoned), _MOST_POISONED)
        if poisoned and hidden > 0:
            yield Text(f"  and {hidden:,} more poisoned shards", "red")


def _counts(dataset: DatasetStatus) -> Text:
    shards = dataset.shards
    text = Text.assemble("dataset ", (printable(dataset.name), "bold"), ": ")
    if shards["poisoned"]:
        text.append(f"{shards['poisoned']:,} poisoned", "bold red").append(", ")
    text.append(f"{shards['done']:,} shards done, {shards['doing']:,} at work, {shards['todo']:,} to do")
    if dataset.epoch is not None and (dataset.epochs or 1) > 1:
        text.append(f", epoch {dataset.epoch + 1} of {dataset.epochs}")
    if dataset.units_per_s:
        text.append(f", {dataset.units_per_s:,.3g} units/s")
    if not dataset.ended:
        text.append(", more may come")
    if dataset.eta_s is not None and not dataset.finished:
        text.append(f", {dataset.eta_s:,.0f} s to go")
    return text


def _poisoned(shard: PoisonedShard) -> str:
    last = shard.failures[-1] if shard.failures else None
    why = f": {printable(last.reason)} ({printable(last.holder)})" if last is not None else ""
    return f"poisoned: shard {shard.shard} (units {shard.start} to {shard.stop}){why}"


_FALLBACK_S = 3.0
"""Timeout for a cluster that the user did not specify: it may have been switched off long ago."""
_EVERY_S = 1.0
"""Refresh interval of `--watch`: agents write about as often."""
_MAX_GONE = 5
"""Maximum number of departed nodes listed; the others are only counted."""
_WIDTH = 160
"""Characters per line if the output is not a terminal."""

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
    "gave up": "bold red",
    "left": "dim",
}

_DESCRIPTION = """\
Lists the jobs in a store, or shows one elastic job: its members with their ranks, how far and how fast they
train, the goodput so far (the share of wall-clock time spent on steps, not counting repetitions of lost steps),
and what happened recently. If the job has a master, its shards are shown too, poisoned ones first. A job unknown
to the default store is looked up in the kubeconfig's Kubernetes cluster; with --kube, --namespace, --context or
--kubeconfig, only there. The reports of a job in Kubernetes are read from the job's store if that is your
EDL_DISCOVERY, otherwise from --store."""

_EXAMPLES = """\
examples:
  edl status                                all jobs in the default store (your SQLite file)
  edl status myjob                          one job
  edl status myjob --watch                  refreshed every second until it ends or Ctrl-C
  edl status myjob --json | jq .goodput     for programs; with --watch, one JSON object per line
  edl status myjob --store consul://10.0.0.7:8500
  edl status myjob -n research              from Kubernetes: with conditions, pods, how they ended, and events
  edl status myjob -n research --store consul://10.0.0.7:8500   if its agents report there and you trust that host
  edl status pool/digits --kube             a pool of teachers
  edl status myjob --forget                 delete the records of a job that has ended or was abandoned"""


def main(argv: Sequence[str]) -> int:
    """Run `edl status`."""
    parser = CommandParser("edl status", _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("job", metavar="JOB", nargs="?", help="name of the job (`edl run --rdzv-id`); without it, list all jobs")
    parser.add_store_option()
    add("--watch", action="store_true", help="refresh until the job ends or Ctrl-C")
    add("--json", action="store_true", help="print JSON")
    add("--forget", action="store_true", help="delete the records of a job that has no agents or master")
    add("--kube", action="store_true", help="look in Kubernetes; JOB is NAME, job/NAME or pool/NAME")
    add_cluster_options(parser)
    options = parser.parse_args(argv)
    in_cluster = options.kube or options.namespace is not None or options.context or options.kubeconfig
    if options.job is None and (options.forget or in_cluster):
        raise SettingsError("name the JOB" + (" (`edl jobs` lists those in Kubernetes)" if in_cluster else ""))
    if in_cluster:
        if options.forget:
            raise SettingsError("--forget is for a job in a store (--store), not for one in a cluster")
        with open_cluster(options) as client:
            show_workload(client, options, _shown)
        return 0
    with open_store(DiscoverySettings.of(options.store).url) as store:
        if options.forget:
            return _forget(store, options.job)
        every_s = _EVERY_S if options.watch else None
        if options.job is None:
            reader = JobReader(store)
            to_json = _json_list if options.json else None
            show_looks(lambda: read_all_jobs(reader), _listed, to_json, _WIDTH, every_s=every_s)
            return 0
        try:
            show_looks(
                lambda: read_job_status(store, options.job, LAST_EVENTS),
                _shown,
                _json if options.json else None,
                _WIDTH,
                every_s=every_s,
                is_over=lambda status: status.state in ("done", "failed", GAVE_UP),
            )
        except SettingsError as exc:
            if options.store is not None or not _show_from_cluster(options, exc):
                raise
    return 0


def _forget(store: Store, job: str) -> int:
    with contextlib.suppress(ProtocolError):  # records that this version cannot read are removed too
        read_job_status(store, job, 0)
    if in_use := delete_job_keys(store, job):
        raise SettingsError(f"--forget {job}: {in_use}; stop them first")
    print(f"job {printable(job)} is removed from the store; its checkpoints are kept")
    return 0


def _show_from_cluster(options: argparse.Namespace, missing: SettingsError) -> bool:
    """Look in the kubeconfig's cluster, if there is one, for a job unknown to the store; return whether it was found.

    `missing` is the error from the store. Raises SettingsError if the cluster does not know the job either, or does not
    answer.
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
            raise SettingsError(f"{missing}; the cluster could not be asked: {exc}") from exc
        show_workload(client, options, _shown)
    return True


def _json(status: JobStatus) -> str:
    """Return the job's entry in `/api/state`, without its history."""
    fields = as_json(status)
    del fields["history"]
    return json.dumps(fields, allow_nan=False)


_Jobs: TypeAlias = tuple[list[JobStatus], list[UnreadableRecord]]
"""What `read_all_jobs` returns."""


def _json_list(found: _Jobs) -> str:
    return f"[{', '.join(map(_json, found[0]))}]"


def _listed(found: _Jobs) -> RenderableType:
    jobs, unreadable = found
    wrong = (Text(printable(f"{record.key} cannot be read: {record.reason}"), "red") for record in unreadable)
    none = [] if jobs or unreadable else [Text("There are no jobs in this store: name another one with --store")]
    return Group(*map(_headline, jobs), *wrong, *none)


def _shown(status: JobStatus) -> RenderableType:
    shards = list(master_lines(status.master)) if status.master is not None else []
    if status.master_only:
        return Group(_headline(status), *shards)
    parts: list[RenderableType] = [_headline(status), *shards]
    if status.message:
        parts.append(Text(printable(last_line(status.message)), "dim"))
    parts += [_where_the_time_went(status), _members(status.nodes)]
    parts += [_left_out(exclusion) for exclusion in status.left_out]
    parts += [_event_line(event) for event in status.events]
    return Group(*parts)


def _headline(status: JobStatus) -> Text:
    title = ("job ", (printable(status.job), "bold"), ": ")
    if status.master_only:
        return Text.assemble(*title, _coloured(status.state))
    if status.generation < 0:
        state = status.state if status.state in ("down", GAVE_UP) else "starting"
        return Text.assemble(*title, _coloured(state), f", {counted(len(status.nodes), 'node')} so far")
    text = Text.assemble(*title, _coloured(status.state))
    text.append(f", generation {status.generation}, {counted(status.world_size, 'rank')}")
    if status.step >= 0:
        text.append(f", step {status.step:,}")
    if status.steps_per_s and status.state == "running":
        text.append(f", {status.steps_per_s:.3g} steps/s")
    if status.samples_per_s and status.state == "running":
        text.append(f", {status.samples_per_s:,.0f} samples/s")
    return text


def _where_the_time_went(status: JobStatus) -> Text:
    elapsed = _duration(status.elapsed_s)
    if status.step < 0:
        return Text(f"goodput unknown: in {elapsed} no step was reported (Checkpointer.save reports steps)")
    text = Text.assemble((f"goodput {status.goodput or 0.0:.1%}", "bold"), f" of {elapsed}")
    for state, seconds in status.seconds.items():
        if seconds:
            text.append(" · ").append_text(_coloured(state)).append(f" {_duration(seconds)}")
    return text


def _members(nodes: Sequence[NodeStatus]) -> Table:
    numbers = ["generation", "step", "steps/s", "samples/s", "heard"]
    if any(node.replica_age_s is not None for node in nodes):
        numbers.append("replica")
    hidden = [node for node in nodes if node.gone][_MAX_GONE:]
    headings = ("node", "ranks", "state", *numbers)
    found = table(headings, (_cells(node)[: len(headings)] for node in nodes if node not in hidden), numbers)
    if hidden:
        found.add_row(Text(f"and {len(hidden)} that left or were lost earlier", "dim"))
    return found


def _left_out(exclusion: Exclusion) -> Text:
    what = f"the host of {printable(exclusion.node)} is left out ({printable(exclusion.reason)}): "
    remedy = "once its GPU is reset or replaced, a reboot or `edl run --readmit` there lets it join again"
    return Text.assemble((what, "bold red"), remedy)


def _cells(node: NodeStatus) -> list[str | Text]:
    return [
        Text(printable(node.node), "dim" if node.gone else ""),
        _ranks(node.ranks) if node.ranks else "",
        _coloured(node.state),
        str(node.generation) if node.generation >= 0 else "",
        f"{node.step:,}" if node.step >= 0 else "",
        f"{node.steps_per_s:.3g}" if node.steps_per_s and not node.gone else "",
        f"{node.samples_per_s:,.0f}" if node.samples_per_s and not node.gone else "",
        f"{_duration(node.silent_s)} ago",
        "" if node.replica_age_s is None else f"{_duration(node.replica_age_s)} old",
    ]


def _event_line(event: Event) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(event.at))
    return Text(printable(f"{clock}  {event.kind:<10}  {event.node}  {event.text}".rstrip()))


def _coloured(state: str) -> Text:
    return Text(state, _STYLES.get(state, ""))


def _ranks(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _duration(seconds: float) -> str:
    """Format a duration: 0.35 s, 12 s, 4 min 05 s, 3 h 20 min."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
