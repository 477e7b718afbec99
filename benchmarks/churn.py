"""How much of the time is useful while nodes join, leave and die, and what `edl run` costs while nothing changes.

A job has one to three nodes with one rank each. Every 30 s, a node joins, leaves on SIGTERM or dies with its agent, or
a worker gets SIGKILL. torchrun uses a store that outlives its nodes; torchft uses a join timeout of 1 s. Each step
sleeps 150 ms instead of using a GPU; all-reduce and snapshots (2.1 million parameters) are real.

- `goodput`: the time that the kept steps would take without disturbance, divided by the elapsed time.
  `goodput_beside_saving` compares with undisturbed jobs that make the same snapshots.
- `steady`: steps per second of two ranks under `edl run` with snapshots, divided by those under torchrun without
  snapshots.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from benchmarks import _launchers as launchers
from benchmarks._child import ROOT
from benchmarks._elastic_churn import GOODPUT_LIMIT, Churn, goodput, most_nodes, trace
from benchmarks._elastic_job import Job
from benchmarks._elastic_task import Task
from benchmarks._harness import Goal, Options, divide, main, note, positive, progress, take_turns
from benchmarks._step_logs import FinishedStep, longest_gap_s

GOALS = [
    Goal("goodput", 0.985),
    Goal("vs_torchrun_goodput", 1.0),
    Goal("vs_torchft_goodput", 1.0),
    Goal("steady", 0.99),
]
_WIDTH = 1024
_SLEEP_S = 0.15
_LEAST, _FIRST, _MOST = 1, 2, 3
_DEFAULT_SEEDS = 3
_FEWEST_STEPS = 3
"""Fewest steps over which an undisturbed step is averaged: a busy machine may finish none in a short time."""
_STEADY, _WINDOW = 3.0, 2.0
"""Multiples of `--seconds`, for `steady` and for each world size before and after a trace. In 12 s, `steady` has enough
steps to resolve 1%. With 3 s instead of 8 s, the references before and after a trace differed by 5%."""
_ALIVE_S = 10.0
_RECOVERED_S = 10.0


@dataclass(frozen=True)
class Extent:
    """The extent of a measurement.

    Attributes:
        events: Number of events in a trace.
        every_s: Seconds between two events.
        settle_steps: Steps that a new world makes before it is measured, or an event happens.
        steady_s: Seconds for each side of `steady`.
        window_s: Seconds of undisturbed steps in each size of world.
        limit: Largest plausible goodput.
    """

    events: int
    every_s: float
    settle_steps: int
    steady_s: float
    window_s: float
    limit: float

    @classmethod
    def of(cls, options: Options) -> Extent:
        """Return the extent for these options. A quick run has no limit: its reference has too few steps for one."""
        steady_s, window_s = _STEADY * options.seconds, _WINDOW * options.seconds
        if options.quick:
            return cls(2, 3.0, 3, steady_s, window_s, math.inf)
        return cls(6, 30.0, 10, steady_s, window_s, GOODPUT_LIMIT)


def _task(stack: ExitStack, *, save_s: float = 0.0) -> Task:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
    return Task(folder, "0", _WIDTH, _SLEEP_S, save_s=save_s)


@dataclass(frozen=True)
class Side:
    """A way to train under the trace.

    Attributes:
        name: Name in tables.
        start: Returns a job of up to three nodes, with none of them started yet.
        restarts: Whether the benchmark restarts a dead rank, since the launcher does not.
        has_ledger: Whether `edl status` also reports the job's goodput.
        beside_saving: Whether undisturbed steps are also measured with snapshots.
    """

    name: str
    start: Callable[[Task, ExitStack], Job]
    restarts: bool = False
    has_ledger: bool = False
    beside_saving: bool = False


def _edl(task: Task, stack: ExitStack) -> Job:
    return stack.enter_context(launchers.edl_nodes(task, _MOST))


def _torchrun(task: Task, stack: ExitStack) -> Job:
    return stack.enter_context(launchers.torchrun_nodes_in_store(task, _MOST))


def _torchft(task: Task, stack: ExitStack) -> Job:
    return stack.enter_context(launchers.torchft(task, 1.0, stack))


def _sides(quick: bool) -> dict[str, Side]:
    """Return the sides by the name of their figure."""
    sides = {"goodput": Side("edl run", _edl, has_ledger=True, beside_saving=not quick)}
    if quick:
        return sides
    sides["goodput_torchrun"] = Side("torchrun in a store of its own", _torchrun)
    if launchers.TORCHFT.exists():
        sides["goodput_torchft"] = Side("torchft, join timeout 1 s", _torchft, restarts=True)
    else:
        note("torchft is not installed (tools/torchft.sh): not compared.\n")
    return sides


def measure(options: Options, seeds: int = _DEFAULT_SEEDS) -> dict[str, list[float]]:
    """Return the rounds of the steady state, and the goodput of each side under the trace of each seed."""
    extent = Extent.of(options)
    rounds = take_turns(
        {
            "edl": partial(_steady, launchers.edl_workers, 0.0, extent),
            "torchrun": partial(_steady, launchers.torchrun_workers, math.inf, extent),
        },
        options.repeats,
    )
    seeds = 1 if options.quick else seeds
    sides = _sides(options.quick)
    seeds_of = {key: iter(range(seeds)) for key in sides}
    runs = take_turns({key: partial(_run, side, seeds_of[key], extent) for key, side in sides.items()}, seeds)
    figures = {key: [run.goodput(run.usual_s) for run in found] for key, found in runs.items()}
    if sides["goodput"].beside_saving:
        figures["goodput_beside_saving"] = [run.goodput(run.saving_s) for run in runs["goodput"]]
    for peer in ("torchrun", "torchft"):
        if f"goodput_{peer}" in figures:
            figures[f"vs_{peer}_goodput"] = divide(figures["goodput"], figures[f"goodput_{peer}"])
    return figures | {"steady": divide(rounds["edl"], rounds["torchrun"])}


def _steady(start: Callable[[Task, int], Job], save_s: float, extent: Extent) -> float:
    """Return the steps per second of two undisturbed ranks."""
    with ExitStack() as stack:
        job = stack.enter_context(start(_task(stack, save_s=save_s), 2))
        job.start(0)
        job.together(count=extent.settle_steps)
        return 1 / statistics.mean(_undisturbed(job, extent.steady_s))


def _undisturbed(job: Job, window_s: float) -> list[float]:
    """Return how long each step took during a window."""
    begin = time.monotonic()
    time.sleep(window_s)  # not a wait for a condition: this is the window
    ends = _ends(job, begin)
    if len(ends) <= _FEWEST_STEPS:
        job.together(count=_FEWEST_STEPS + 1)
        ends = _ends(job, begin)
    return [after - before for before, after in pairwise(ends)]


def _ends(job: Job, begin: float) -> list[float]:
    """Return when the first place finished its steps since `begin`."""
    job.step_logs.read()
    return [step.at for step in job.step_logs.steps[job.places()[0]] if step.at >= begin]


@dataclass(frozen=True)
class Run:
    """What the ranks of one job wrote under a trace.

    Attributes:
        steps: Finished steps by place.
        until: When the trace ended (`time.monotonic()`).
        usual_s: Size of a world -> its undisturbed step time, without snapshots.
        saving_s: The same with snapshots; empty if it is not measured.
        limit: Largest plausible goodput.
    """

    steps: list[list[FinishedStep]]
    until: float
    usual_s: Mapping[int, float]
    saving_s: Mapping[int, float]
    limit: float

    def goodput(self, step_s: Mapping[int, float]) -> float:
        """Return the useful share of the time, given the undisturbed step time by the size of the world."""
        return goodput(self.steps, step_s, self.until, self.limit)


def _run(side: Side, seeds: Iterator[int], extent: Extent) -> Run:
    """Run a job under the next seed's trace, with undisturbed steps measured before and after, and note the results."""
    seed, every_s = next(seeds), extent.every_s
    plan = trace(seed=seed, events=extent.events, nodes=_FIRST, least=_LEAST, most=_MOST)
    usual = partial(_reference, side, math.inf, most_nodes(plan, _FIRST), extent)
    saving = partial(_reference, side, 0.0, most_nodes(plan, _FIRST), extent)
    references = [usual, saving] if side.beside_saving else [usual]
    progress("undisturbed steps before")
    before = [measure_steps() for measure_steps in references]
    with ExitStack() as stack:
        task = _task(stack)
        job = side.start(task, stack)
        for number in range(_FIRST):
            job.start(number)
        job.together(count=extent.settle_steps)
        ledger = _ledger(task) if side.has_ledger else None
        begin = time.monotonic()
        lines = [_happen(side, job, kind, begin + (number + 0.5) * every_s) for number, kind in enumerate(plan)]
        _sleep_until(begin + extent.events * every_s)
        job.step_logs.read()
        steps, until = list(job.step_logs.since(begin).values()), time.monotonic()
        table = [line() for line in lines]
        spent = {} if ledger is None else _spent(ledger, _ledger(task))
    progress("undisturbed steps after")
    after = [measure_steps() for measure_steps in reversed(references)][::-1]
    usual_s, *others_s = [_mean(*pair) for pair in zip(before, after, strict=True)]
    run = Run(steps, until, usual_s, others_s[0] if others_s else {}, extent.limit)
    note(f"\n{side.name}, seed {seed}: {run.goodput(usual_s):.4f}\n")
    note("| what happens | nodes before | after | longest time between two steps of those who stayed, s |")
    note("| --- | ---: | ---: | ---: |")
    note("\n".join(table))
    note(f"\nAn undisturbed step, no snapshots: {_ms(before[0], after[0])}.\n")
    if others_s:
        note(f"An undisturbed step, snapshots: {_ms(before[1], after[1])}.\n")
    if spent:
        parts = ", ".join(f"{name} {spent_s:.2f} s" for name, spent_s in spent.items() if spent_s)
        share = spent["train"] / sum(spent.values())
        note(f"The job's own ledger says a goodput of {share:.3f} for that time: {parts}.\n")
    idle_s = until - max(log[-1].at for log in steps)
    if idle_s > _ALIVE_S:
        note(f"**No step was finished in the last {idle_s:.0f} s.**\n")
    return run


def _reference(side: Side, save_s: float, nodes: int, extent: Extent) -> dict[int, float]:
    """Return the step time in undisturbed worlds of one to `nodes` ranks."""
    found = {}
    with ExitStack() as stack:
        job = side.start(_task(stack, save_s=save_s), stack)
        for number in range(nodes):
            job.start(number)
            job.together(count=extent.settle_steps)
            found[number + 1] = statistics.mean(_undisturbed(job, extent.window_s))
    return found


def _mean(before: Mapping[int, float], after: Mapping[int, float]) -> dict[int, float]:
    return {size: (before[size] + after[size]) / 2 for size in before}


def _ms(before: Mapping[int, float], after: Mapping[int, float]) -> str:
    return ", ".join(
        f"{1e3 * before[size]:.1f} ms before and {1e3 * after[size]:.1f} ms after with {size}" for size in before
    )


def _happen(side: Side, job: Job, kind: Churn, at: float) -> Callable[[], str]:
    """Cause an event at that time, and return a function that reports on it after the trace."""
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
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            job.signal_rank(f"{numbers[-1]}-0")
    rest = [place for place in before if place in job.places()]
    happened = time.monotonic()
    if side.restarts and kind is Churn.KILL_RANK:
        job.start(numbers[-1])
    nodes = len(job.nodes)

    def tell() -> str:
        gaps = [longest_gap_s(job.step_logs.steps[place], happened, happened + _RECOVERED_S) for place in rest]
        return f"| {kind.value} | {len(before)} | {nodes} | {f'{max(gaps):.2f}' if gaps else 'none stayed'} |"

    return tell


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))


def _spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in before if name in after}


def _ledger(task: Task) -> dict[str, float]:
    """Return the seconds by purpose, from the job's own ledger; empty if the ledger cannot be read."""
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
        return {}
    seconds: dict[str, float] = json.loads(done.stdout)["seconds"]
    return seconds


if __name__ == "__main__":
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--seeds", type=positive, default=_DEFAULT_SEEDS, help="traces per side (default %(default)s)")
    main("churn", partial(measure, seeds=own.parse_known_args()[0].seeds), GOALS, __doc__, own=[own])
