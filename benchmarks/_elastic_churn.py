"""A seeded trace of nodes that join, leave and die, and the share of time under it that was useful. Without I/O."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from benchmarks._step_logs import FinishedStep

__all__ = ["GOODPUT_LIMIT", "Churn", "goodput", "most_nodes", "surviving_line", "trace"]

GOODPUT_LIMIT = 1.05
"""A share of time is at most 1. On a shared machine, however, undisturbed steps vary by about 3% over a few seconds, so
a limit of 1 would refuse an undisturbed run. A higher limit would accept steps that were counted twice."""

_BESIDE_STEPS = 2
"""If two worlds train at the end, the slower one has finished a step within this many steps of the other's last."""


class Churn(enum.Enum):
    """What happens to a job."""

    JOIN = "a node joins"
    LEAVE = "a node leaves (SIGTERM)"
    KILL_NODE = "a node and its agent die (SIGKILL)"
    KILL_RANK = "a worker dies (SIGKILL)"


_GOES = (Churn.LEAVE, Churn.KILL_NODE)


def trace(seed: int, events: int, nodes: int, least: int, most: int) -> list[Churn]:
    """Return events for a job that begins with `nodes` nodes, and never has fewer than `least` or more than `most`.

    Each kind comes once in every four events, in random order as far as the bounds allow.
    """
    chance = random.Random(seed)
    found: list[Churn] = []
    bag: list[Churn] = []
    while len(found) < events:
        if not bag:
            bag = [*Churn]
        allowed = [kind for kind in bag if _stays_within(kind, nodes, least, most)]
        kind = chance.choice(allowed or [Churn.KILL_RANK])
        if kind in bag:
            bag.remove(kind)
        else:
            bag = []  # none of the remaining kinds is possible now
        nodes += (kind is Churn.JOIN) - (kind in _GOES)
        found.append(kind)
    return found


def _stays_within(kind: Churn, nodes: int, least: int, most: int) -> bool:
    if kind is Churn.JOIN:
        return nodes < most
    return kind not in _GOES or nodes > least


def most_nodes(plan: Sequence[Churn], nodes: int) -> int:
    """Return the most nodes that a job has under a trace, if it begins with `nodes`."""
    changes = [(kind is Churn.JOIN) - (kind in _GOES) for kind in plan]
    return max(accumulate(changes, initial=nodes))


def surviving_line(step_logs: Iterable[Sequence[FinishedStep]], beside_s: float) -> list[FinishedStep]:
    """Return the steps that led to a job's final state, the newest first, each step number once.

    A process that goes from step n - 1 to step n carries the state. If all processes that finished step n are new, they
    have the state of the processes that last finished a smaller step. This leaves out steps that were repeated, steps
    of parallel worlds (split quorums) that were thrown away, and steps before a job restarted from the beginning.

    Args:
        step_logs: Logs of all places.
        beside_s: Among worlds that finished steps in this many seconds before the end, the one with the most steps
            survives.
    """
    steps = sorted((step for step_log in step_logs for step in step_log), key=lambda step: step.at)
    by_number: dict[int, list[FinishedStep]] = {}
    for step in steps:
        by_number.setdefault(step.step, []).append(step)
    recent = [step for step in steps if step.at >= steps[-1].at - beside_s]
    line = [max(recent, key=lambda step: (step.step, step.at))]
    for number in sorted(by_number, reverse=True):
        newest = line[-1]
        earlier = [step for step in by_number[number] if step.at < newest.at]
        if number >= newest.step or not earlier:
            continue
        together = {step.pid for step in by_number[newest.step] if step.generation == newest.generation}
        carried = [step for step in earlier if step.pid in together]
        line.append((carried or earlier)[-1])
    return line


def goodput(
    step_logs: Iterable[Sequence[FinishedStep]],
    step_s: Mapping[int, float],
    until: float,
    limit: float = GOODPUT_LIMIT,
) -> float:
    """Return useful time divided by elapsed time, from the first finished step in the logs until `until`.

    Each surviving step counts once, with the time that it takes in an undisturbed world of the size that finished it.

    Args:
        step_logs: Logs of all places during the measured time.
        step_s: Size of a world -> its undisturbed step time.
        until: End of the measured time (`time.monotonic()`). If a job stands still at the end, that time is not useful.
        limit: Largest plausible goodput.

    Raises:
        ValueError: No step was finished, or the goodput is above `limit`.
    """
    step_logs = list(step_logs)
    if not any(step_logs):
        raise ValueError("no step was finished: a goodput needs the logs of a job that trained")
    first = min((step for step_log in step_logs for step in step_log), key=lambda step: step.at)
    line = surviving_line(step_logs, beside_s=_BESIDE_STEPS * max(step_s.values()))
    begun = (first.step, first.generation)
    useful_s = sum(step_s[step.world] for step in line if (step.step, step.generation) != begun)
    elapsed_s = until - first.at
    if useful_s > limit * elapsed_s:
        raise ValueError(
            f"a goodput of {useful_s / elapsed_s:.3g}, where at most {limit:g} is believed: {len(line)} steps "
            f"({line[-1].step} to {line[0].step}) take {useful_s:.1f} s undisturbed, but {elapsed_s:.1f} s passed. "
            "Steps were counted twice, or undisturbed steps were measured while the machine was slower"
        )
    return useful_s / elapsed_s
