"""How much of the time is of use while nodes come, go and die, and what `edl run` costs while nothing happens.

A job of one to three nodes (a rank each, two at first) on this machine; every 30 s for five minutes something happens
to it: a node joins, one leaves by SIGTERM, one dies with its agent, or a worker dies by SIGKILL, in a seeded order. Of
each step 150 ms are slept in place of a GPU's work, since three ranks would fight for the cores of a small machine;
backward, the all-reduce and the snapshots (2.1 million parameters) are real.

- `goodput`: the time that the steps of the job take in undisturbed worlds of the same sizes, with the same snapshots,
  by the time that passed; a step that was done twice counts once. `goodput_in_process`: the same with `stay`.
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
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path

from benchmarks import _elastic_ways as ways
from benchmarks._child import ROOT
from benchmarks._elastic_churn import Churn, goodput, trace
from benchmarks._elastic_diaries import longest_gap_s
from benchmarks._elastic_job import Job
from benchmarks._elastic_task import Task
from benchmarks._harness import Goal, Options, divide, main, note, progress, take_turns

GOALS = [Goal("goodput", 0.98), Goal("goodput_in_process", 0.98), Goal("steady", 0.98)]
_WIDTH = 1024
_SLEEP_S = 0.15
_LEAST, _FIRST, _MOST = 1, 2, 3
_EVERY_S = 30.0
_EVENTS = 10
_SETTLE_STEPS = 10
_ALIVE_S = 10.0
_RECOVERED_S = 10.0


def _task(stack: ExitStack, *, stay: bool = False, save_s: float = 0.0) -> Task:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
    return Task(folder, "0", _WIDTH, _SLEEP_S, save_s=save_s, stay=stay)


def measure(options: Options) -> dict[str, list[float]]:
    """Two traces, with undisturbed runs before them, and rounds of the steady state."""
    window_s = 2.0 if options.quick else 3 * options.seconds
    rounds = take_turns(
        {
            "edl": partial(_steady, ways.edl_workers, 0.0, window_s),
            "torchrun": partial(_steady, ways.torchrun_workers, math.inf, window_s),
        },
        options.repeats,
    )
    figures = {"steady": divide(rounds["edl"], rounds["torchrun"])}
    for key, stay in (("goodput", False), ("goodput_in_process", True)):
        if not (stay and options.quick):
            figures[key] = [_churn(stay, window_s, options.quick)]
    return figures


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
    job.diaries.look()
    ends = [one.at for one in job.diaries.steps[job.places()[0]] if one.at >= begin]
    return [after - before for before, after in pairwise(ends)]


def _churn(stay: bool, window_s: float, quick: bool) -> float:
    """The goodput of one trace, and a note of how it went."""
    events, every_s = (2, 6.0) if quick else (_EVENTS, _EVERY_S)
    plan = trace(seed=int(stay), events=events, nodes=_FIRST, least=_LEAST, most=_MOST)
    with ExitStack() as stack:
        step_s = _reference(stay, window_s)
        task = _task(stack, stay=stay)
        job = stack.enter_context(ways.edl_nodes(task, _MOST))
        for number in range(_FIRST):
            job.start(number)
        job.together(count=_SETTLE_STEPS)
        ledger = _ledger(task)
        begin = time.monotonic()
        lines = [_one(job, kind, begin + (number + 0.5) * every_s) for number, kind in enumerate(plan)]
        _sleep_until(begin + events * every_s)
        job.diaries.look()
        diaries = job.diaries.since(begin)
        now = time.monotonic()
        figure = goodput(diaries.values(), step_s, now)
        idle_s = now - max(steps[-1].at for steps in diaries.values())
        train_s, all_s = (after - before for before, after in zip(ledger, _ledger(task), strict=True))
        _tell(stay, [line() for line in lines], step_s, train_s / all_s)
        if idle_s > _ALIVE_S:
            note(f"**No step was finished in the last {idle_s:.0f} s.**\n")
    return figure


def _reference(stay: bool, window_s: float) -> dict[int, float]:
    """The time of a step in a world of one, two and three ranks that nobody disturbs."""
    found = {}
    with ExitStack() as stack:
        job = stack.enter_context(ways.edl_nodes(_task(stack, stay=stay), _MOST))
        for number in range(_MOST):
            job.start(number)
            job.together(count=_SETTLE_STEPS)
            found[number + 1] = statistics.median(_undisturbed(job, window_s))
    return found


def _one(job: Job, kind: Churn, at: float) -> Callable[[], str]:
    """Let one thing happen at that time. Returns what tells, once the trace is over, how it went."""
    progress(f"next: {kind.value}")
    _sleep_until(at)
    job.diaries.look()
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

    def tell() -> str:
        gaps = [longest_gap_s(job.diaries.steps[place], happened, happened + _RECOVERED_S) for place in rest]
        return f"| {kind.value} | {len(before)} | {nodes} | {max(gaps):.2f} |"

    return tell


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))


def _ledger(task: Task) -> tuple[float, float]:
    """Seconds of training, and of all, that the job's own ledger knows of; nothing where it cannot be read."""
    command = [sys.executable, "-m", "edl", "status", ways.job_name(task), "--store", ways.store_url(task), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        note(f"`edl status` failed: {done.stderr}\n")
        return math.nan, math.nan
    found = json.loads(done.stdout)
    return float(found["seconds"]["train"]), float(found["elapsed_s"])


def _tell(stay: bool, lines: list[str], step_s: dict[int, float], ledger: float) -> None:
    usual = ", ".join(f"{1e3 * seconds:.0f} ms with {size}" for size, seconds in step_s.items())
    note(f"\nThe trace{' in process' if stay else ''} (an undisturbed step takes {usual}):\n")
    note("| what happens | nodes before | after | longest time between two steps of those who stayed, s |")
    note("| --- | ---: | ---: | ---: |")
    note("\n".join(lines))
    note(f"\nThe job's own ledger says a goodput of {ledger:.3f} for that time.\n")


if __name__ == "__main__":
    main("churn", measure, GOALS, __doc__)
