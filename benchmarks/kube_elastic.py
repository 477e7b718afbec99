"""Measure what elastic jobs gain on a real Kubernetes cluster, compared with all-or-nothing jobs.

The cluster of `../shared/kube` has four GPUs that are advertised but absent. A job with two workers runs; then one
arrives that can use four GPUs, with `minReplicas: 1` or with `minReplicas: 4`, which is gang scheduling. Workers are
`edl run` with a script that sleeps, so this measures pods, starts and regroupings.

- `wait_vs_gang`: from the second job's creation to its first unit of work, divided by gang scheduling's time.
- `utilization`, `utilization_gang`: the share of the GPUs' time that went into work.
- `span_vs_gang`: the time of both jobs together, divided by gang scheduling's.
- `wait_s`: seconds from the second job's creation to its first unit: the operator, a pod's start, and a rendezvous.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks._child import ROOT
from benchmarks._harness import Goal, Options, Spread, divide, main, note, take_turns
from benchmarks._kube.picture import draw_sharing
from benchmarks._kube.sharing import GPUS, Sharing, Work, share_gpus
from benchmarks._kube.stage import Stage, open_stage

GOALS = [Goal("wait_vs_gang", 0.5, "at most"), Goal("span_vs_gang", 0.95, "at most")]
_PICTURE = ROOT / "docs/images/kube_elastic.png"
_QUICK = Work(first=20, second=20, after_s=2.0, unit_s=0.5)
_WHOLE = Work(first=120, second=200, after_s=10.0)


def measure(options: Options, picture: Path | None) -> dict[str, list[float]]:
    """Return the figures of each round."""
    work = _QUICK if options.quick else _WHOLE
    with open_stage(GPUS // 2) as stage:
        stage.operator("--store", stage.store, capacity=True)
        sides = {
            "elastic": partial(_share, stage, work, elastic=True),
            "all or nothing": partial(_share, stage, work, elastic=False),
        }
        rounds = take_turns(sides, options.repeats)
    _tell(rounds)
    if picture is not None and not options.quick:
        draw_sharing({name: found[0] for name, found in rounds.items()}, picture)
    elastic, gang = rounds.values()
    return {
        "wait_vs_gang": divide([found.second.wait_s for found in elastic], [found.second.wait_s for found in gang]),
        "span_vs_gang": divide([found.span_s for found in elastic], [found.span_s for found in gang]),
        "utilization": [found.utilization for found in elastic],
        "utilization_gang": [found.utilization for found in gang],
        "wait_s": [found.second.wait_s for found in elastic],
    }


def _share(stage: Stage, work: Work, *, elastic: bool) -> Sharing:
    number = sum(1 for _ in stage.folder.glob("round-*"))
    folder = stage.folder / f"round-{number}"
    template = stage.pod_template(gpus=1, writes=[folder])
    found = share_gpus(stage.scene, template, folder, work, elastic=elastic)
    for name in ("first", "second"):
        stage.scene.delete_job(name)
    return found


def _tell(rounds: dict[str, list[Sharing]]) -> None:
    """Note a table of both sides, with the median, lowest and highest of the rounds."""
    note(f"| {len(next(iter(rounds.values())))} rounds: median (lowest to highest) | {' | '.join(rounds)} |")
    note("| --- |" + " ---: |" * len(rounds))
    rows: dict[str, Callable[[Sharing], float]] = {
        "the second job waits, s": lambda found: found.second.wait_s,
        "it is done after, s": lambda found: found.second.span_s,
        "both jobs are done after, s": lambda found: found.span_s,
        "GPUs at work, %": lambda found: 100 * found.utilization,
    }
    for name, compute in rows.items():
        cells = [str(Spread.of([compute(found) for found in sides])) for sides in rounds.values()]
        note(f"| {name} | {' | '.join(cells)} |")
    note("")


if __name__ == "__main__":
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--picture", type=Path, default=_PICTURE, help="file to draw a round in (default %(default)s)")
    main("kube_elastic", partial(measure, picture=own.parse_known_args()[0].picture), GOALS, __doc__, own=[own])
