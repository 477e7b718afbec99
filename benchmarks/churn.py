"""How much of the time is of use while nodes come, go and die, and what `edl run` costs while nothing happens.

A job of one to three nodes (a rank each, two at first) on this machine; every 30 s something happens to it: a node
joins, one leaves by SIGTERM, one dies with its agent, or a worker dies by SIGKILL, in the order of a seed. Each round
has another seed, and all sides meet the same trace: `edl run`, `edl run` with `stay` (survivors go on in process),
torchrun whose nodes meet in the same store as ours, and torchft with a join timeout of 1 s, whose ranks are started
again at once, as its documentation wants it from a scheduler. Of each step 150 ms are slept in place of a GPU's work,
since three ranks would fight for the cores of a small machine; backward, the all-reduce and the snapshots (2.1 million
parameters) are real.

- `goodput`: the time that the steps of the job take in undisturbed worlds of the same sizes without any snapshot, by
  the time that passed; a step that was done twice counts once. `goodput_in_process`: the same with `stay`.
- `goodput_beside_saving`: the same as `goodput`, by undisturbed worlds that make the same snapshots.
- `vs_torchrun_goodput`: `goodput` by torchrun's; `vs_torchft_goodput`: `goodput_in_process` by torchft's. Each side is
  measured against undisturbed worlds of its own.
- `steady`: steps a second of two ranks under `edl run`, snapshots included, by those of the same model under torchrun
  without EDL and without any checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from benchmarks import _launchers as launchers
from benchmarks._child import ROOT
from benchmarks._elastic_churn import Churn, goodput, trace
from benchmarks._elastic_job import Job
from benchmarks._elastic_task import Task
from benchmarks._harness import Goal, Options, divide, main, note, progress, take_turns
from benchmarks._step_logs import FinishedStep, longest_gap_s

GOALS = [
    Goal("goodput", 0.985),
    Goal("goodput_in_process", 0.985),
    Goal("vs_torchrun_goodput", 1.0),
    Goal("vs_torchft_goodput", 1.0),
    Goal("steady", 0.99),
]
_WIDTH = 1024
_SLEEP_S = 0.15
_LEAST, _FIRST, _MOST = 1, 2, 3
_EVERY_S = 30.0
_EVENTS = 6
_SEEDS = 3
_SETTLE_STEPS = 10
_ALIVE_S = 10.0
_RECOVERED_S = 10.0


def _task(stack: ExitStack, *, stay: bool = False, save_s: float = 0.0) -> Task:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
    return Task(folder, "0", _WIDTH, _SLEEP_S, save_s=save_s, stay=stay)


@dataclass(frozen=True)
class Side:
    """A way to train under the trace.

    Attributes:
        name: for tables.
        start: a job of up to three nodes, none of them started yet.
        stay: survivors go on in process.
        restarts: a rank that died is started again by the benchmark, since nobody else does.
        has_ledger: `edl status` knows the job's goodput, too.
    """

    name: str
    start: Callable[[Task, ExitStack], Job]
    stay: bool = False
    restarts: bool = False
    has_ledger: bool = False


def _edl(task: Task, stack: ExitStack) -> Job:
    return stack.enter_context(launchers.edl_nodes(task, _MOST))


def _torchrun(task: Task, stack: ExitStack) -> Job:
    return stack.enter_context(launchers.torchrun_nodes_in_store(task, _MOST))


def _torchft(task: Task, stack: ExitStack) -> Job:
    return stack.enter_context(launchers.torchft(task, 1.0, stack))


def _sides(quick: bool) -> dict[str, Side]:
    """By the figure that each of them gives."""
    sides = {"goodput": Side("edl run", _edl, has_ledger=True)}
    if quick:
        return sides
    sides["goodput_in_process"] = Side("edl run, in process", _edl, stay=True, has_ledger=True)
    sides["goodput_torchrun"] = Side("torchrun in the same store", _torchrun)
    if launchers.TORCHFT.exists():
        sides["goodput_torchft"] = Side("torchft, join timeout 1 s", _torchft, restarts=True)
    else:
        note("torchft is not installed (tools/torchft.sh): not compared.\n")
    return sides


def measure(options: Options) -> dict[str, list[float]]:
    """Rounds of the steady state, and the trace of each seed on every side, with undisturbed runs before."""
    window_s = 2.0 if options.quick else 3 * options.seconds
    rounds = take_turns(
        {
            "edl": partial(_steady, launchers.edl_workers, 0.0, window_s),
            "torchrun": partial(_steady, launchers.torchrun_workers, math.inf, window_s),
        },
        options.repeats,
    )
    sides = _sides(options.quick)
    usual = {key: _reference(side, math.inf, window_s) for key, side in sides.items()}
    saving = _reference(sides["goodput"], 0.0, window_s)
    seeds = {key: iter(range(_SEEDS)) for key in sides}
    runs = take_turns(
        {key: partial(_run, side, seeds[key], usual[key], options.quick) for key, side in sides.items()},
        1 if options.quick else _SEEDS,
    )
    figures = {key: [run.goodput(usual[key]) for run in found] for key, found in runs.items()}
    figures["goodput_beside_saving"] = [run.goodput(saving) for run in runs["goodput"]]
    for key, ours in (("goodput_torchrun", "goodput"), ("goodput_torchft", "goodput_in_process")):
        if key in figures:
            figures[f"vs_{key.removeprefix('goodput_')}_goodput"] = divide(figures[ours], figures[key])
    return figures | {"steady": divide(rounds["edl"], rounds["torchrun"])}


def _steady(start: Callable[[Task, int], Job], save_s: float, window_s: float) -> float:
    """Steps a second of two ranks that nobody disturbs."""
    with ExitStack() as stack:
        job = stack.enter_context(start(_task(stack, save_s=save_s), 2))
        job.start(0)
        job.together(count=_SETTLE_STEPS)
        return 1 / statistics.mean(_undisturbed(job, window_s))


def _undisturbed(job: Job, window_s: float) -> list[float]:
    """How long each step of a while took."""
    begin = time.monotonic()
    time.sleep(window_s)  # no wait for something: the window
    job.step_logs.read()
    ends = [step.at for step in job.step_logs.steps[job.places()[0]] if step.at >= begin]
    return [after - before for before, after in pairwise(ends)]


@dataclass(frozen=True)
class Run:
    """What the ranks of one job wrote under a trace, which ended at `until` (`time.monotonic()`)."""

    steps: list[list[FinishedStep]]
    until: float

    def goodput(self, step_s: dict[int, float]) -> float:
        """The useful part of the time, given the time of an undisturbed step by the size of the world."""
        return goodput(self.steps, step_s, self.until)


def _run(side: Side, seeds: Iterator[int], usual: dict[int, float], quick: bool) -> Run:
    """Let a job live through the trace of the next seed, and note how it went."""
    events, every_s = (2, 6.0) if quick else (_EVENTS, _EVERY_S)
    seed = next(seeds)
    plan = trace(seed=seed, events=events, nodes=_FIRST, least=_LEAST, most=_MOST)
    with ExitStack() as stack:
        task = _task(stack, stay=side.stay)
        job = side.start(task, stack)
        for number in range(_FIRST):
            job.start(number)
        job.together(count=_SETTLE_STEPS)
        ledger = _ledger(task) if side.has_ledger else None
        begin = time.monotonic()
        lines = [_happen(side, job, kind, begin + (number + 0.5) * every_s) for number, kind in enumerate(plan)]
        _sleep_until(begin + events * every_s)
        job.step_logs.read()
        run = Run(list(job.step_logs.since(begin).values()), time.monotonic())
        note(f"\n{side.name}, seed {seed}: {run.goodput(usual):.4f}\n")
        note("| what happens | nodes before | after | longest time between two steps of those who stayed, s |")
        note("| --- | ---: | ---: | ---: |")
        note("\n".join(line() for line in lines))
        if ledger is not None:
            train_s, all_s = (after - before for before, after in zip(ledger, _ledger(task), strict=True))
            note(f"\nThe job's own ledger says a goodput of {train_s / all_s:.3f} for that time.\n")
        idle_s = run.until - max(steps[-1].at for steps in run.steps)
        if idle_s > _ALIVE_S:
            note(f"**No step was finished in the last {idle_s:.0f} s.**\n")
    return run


def _reference(side: Side, save_s: float, window_s: float) -> dict[int, float]:
    """The time of a step in a world of one, two and three ranks that nobody disturbs."""
    found = {}
    with ExitStack() as stack:
        job = side.start(_task(stack, stay=side.stay, save_s=save_s), stack)
        for number in range(_MOST):
            job.start(number)
            job.together(count=_SETTLE_STEPS)
            found[number + 1] = statistics.median(_undisturbed(job, window_s))
    snapshots = "no snapshots" if save_s else "snapshots"
    usual = ", ".join(f"{1e3 * seconds:.1f} ms with {size}" for size, seconds in found.items())
    note(f"An undisturbed step of {side.name}, {snapshots}: {usual}.\n")
    return found


def _happen(side: Side, job: Job, kind: Churn, at: float) -> Callable[[], str]:
    """Let one thing happen at that time. Returns what tells, once the trace is over, how it went."""
    progress(f"next: {kind.value}")
    _sleep_until(at)
    job.step_logs.read()
    before = job.places()
    numbers = sorted(job.nodes)
    if kind is Churn.JOIN:
        job.start(job.next_number)
    elif kind is Churn.LEAVE:
        job.ask_to_leave(numbers[-1])
    elif kind is Churn.KILL_NODE:
        job.kill_node(numbers[0])
    else:
        with contextlib.suppress(ProcessLookupError):  # it had ended at this very moment
            job.signal_rank(f"{numbers[-1]}-0")
    rest = [place for place in before if place in job.places()]
    happened, nodes = time.monotonic(), len(job.nodes)
    if side.restarts and kind is Churn.KILL_RANK:
        job.start(numbers[-1])

    def tell() -> str:
        gaps = [longest_gap_s(job.step_logs.steps[place], happened, happened + _RECOVERED_S) for place in rest]
        return f"| {kind.value} | {len(before)} | {nodes} | {max(gaps, default=math.nan):.2f} |"

    return tell


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))


def _ledger(task: Task) -> tuple[float, float]:
    """Seconds of training, and of all, that the job's own ledger knows of; nothing where it cannot be read."""
    command = [
        sys.executable,
        "-m",
        "edl",
        "status",
        launchers.job_name(task),
        "--store",
        launchers.store_url(task),
        "--json",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        note(f"`edl status` failed: {done.stderr}\n")
        return math.nan, math.nan
    found = json.loads(done.stdout)
    return float(found["seconds"]["train"]), float(found["elapsed_s"])


if __name__ == "__main__":
    main("churn", measure, GOALS, __doc__)
