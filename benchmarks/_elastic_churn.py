"""A seeded trace of nodes that come, go and die, and what part of the time under it was of use. Pure."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterable, Mapping, Sequence

from benchmarks._step_logs import FinishedStep

__all__ = ["Churn", "goodput", "trace"]


class Churn(enum.Enum):
    """What happens to a job."""

    JOIN = "a node joins"
    LEAVE = "a node leaves (SIGTERM)"
    KILL_NODE = "a node with its agent dies (SIGKILL)"
    KILL_RANK = "a worker dies (SIGKILL)"


_GOES = (Churn.LEAVE, Churn.KILL_NODE)


def trace(seed: int, events: int, nodes: int, least: int, most: int) -> list[Churn]:
    """A sequence of events for a job that begins with `nodes`, and never has fewer than `least` or more than `most`.

    Of four events each kind comes once, in random order as far as the bounds allow it.
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
            bag = []  # none of the rest is possible now
        nodes += (kind is Churn.JOIN) - (kind in _GOES)
        found.append(kind)
    return found


def _stays_within(kind: Churn, nodes: int, least: int, most: int) -> bool:
    if kind is Churn.JOIN:
        return nodes < most
    return kind not in _GOES or nodes > least


def goodput(step_logs: Iterable[Sequence[FinishedStep]], step_s: Mapping[int, float], until: float) -> float:
    """Useful time by elapsed time, from the first finished step of the job until `until`.

    Each step counts once, however often it was done, with the time that it takes in an undisturbed world of the size
    that finished it for good.

    Args:
        step_logs: of all places.
        step_s: size of a world -> its undisturbed time of a step.
        until: `time.monotonic()`; a job that stands still at the end is of no use until then.
    """
    steps = sorted((one for step_log in step_logs for one in step_log), key=lambda one: one.at)
    last = {one.step: one for one in steps}
    first = min(last)
    useful_s = sum(step_s[one.world] for number, one in last.items() if number != first)
    return useful_s / (until - next(one.at for one in steps if one.step == first))
