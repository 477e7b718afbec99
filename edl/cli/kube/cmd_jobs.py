"""`edl jobs`: jobs and pools of a Kubernetes cluster, with their workers, teachers and progress."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from edl.cli._changes import printable
from edl.cli._jobs import console
from edl.cli.kube.connection import add_cluster_options, command_parser, open_cluster
from edl.cli.kube.tables import jobs_table, pools_table
from edl.dashboard.state.cluster.reader import ClusterReader
from edl.dashboard.state.cluster.schema import KubernetesStatus
from edl.dashboard.state.schema import as_json

__all__ = ["main"]

_EVERY_S: Final = 2.0
"""Between two looks of `--watch`: the operator changes a status about as often."""
_WIDTH: Final = 200
"""Characters where the output is no terminal, so that no row is wrapped."""

_DESCRIPTION = """\
Shows the jobs (ElasticJob) and pools of teachers (TeacherPool) of a namespace: their phase, how many members are ready,
are wanted and may be, how far jobs are, and why something waits. `kubectl get elasticjobs,teacherpools` shows the same
resources; `edl status JOB` shows all of a job."""

_EXAMPLES = """\
examples:
  edl jobs                          of the context's namespace
  edl jobs -A --watch               of all namespaces, again as it changes, until Ctrl-C
  edl jobs --json | jq '.jobs[] | select(.phase == "Failed")'"""


def main(argv: Sequence[str]) -> int:
    """Run `edl jobs`."""
    parser = command_parser("jobs", _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("-A", "--all-namespaces", action="store_true", help="of the whole cluster")
    add("-w", "--watch", action="store_true", help="go on until Ctrl-C")
    add("--json", action="store_true", help="print JSON; with --watch an object a line")
    add_cluster_options(parser)
    options = parser.parse_args(argv)
    with open_cluster(options) as client:
        reader = ClusterReader(client, () if options.all_namespaces else (client.namespace,))
        status = reader.read()
        if options.watch:
            _watch(reader, status, options)
        else:
            _print(console(_WIDTH), status, options)
    return 0


def _watch(reader: ClusterReader, status: KubernetesStatus, options: argparse.Namespace) -> None:
    """Show again what changes; an API server that is away is said, and is not the end."""
    screen = console(_WIDTH)
    if screen.is_terminal and not options.json:
        with Live(console=screen, auto_refresh=False) as live:
            while True:
                live.update(_shown(status, time.time(), options.all_namespaces), refresh=True)
                time.sleep(_EVERY_S)
                status = reader.read_again()
    last: KubernetesStatus | None = None
    while True:
        if last is None or _facts(last) != _facts(status):
            _print(screen, status, options)
            last = status
        time.sleep(_EVERY_S)
        status = reader.read_again()


def _facts(status: KubernetesStatus) -> tuple[object, ...]:
    return status.jobs, status.pools, status.stale


def _print(screen: Console, status: KubernetesStatus, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(as_json(status), allow_nan=False), flush=True)
    else:
        screen.print(_shown(status, time.time(), options.all_namespaces))


def _shown(status: KubernetesStatus, now_s: float, namespaces: bool) -> RenderableType:
    parts: list[RenderableType] = []
    if status.jobs:
        parts.append(jobs_table(status.jobs, now_s, namespaces=namespaces))
    if status.pools:
        parts.append(pools_table(status.pools, now_s, namespaces=namespaces))
    if not parts:
        where = "the cluster" if namespaces else f"namespace {', '.join(status.namespaces)!r}"
        parts.append(Text(printable(f"There are no jobs and no pools in {where}; `edl submit` makes one.")))
    if status.more_jobs:
        parts.append(Text(f"and {status.more_jobs:,} jobs that ended before those", "dim"))
    if status.stale:
        parts.append(Text(printable(status.stale), "bold red"))
    return Group(*parts)
