"""How many students a teacher should have: loads as even as capacities and wants allow. Pure.

Which loads are possible at all is Gale's and Ryser's theorem: students that want d_s different teachers can give the
teachers exactly the loads whose k largest sum to at most `takers[0] + … + takers[k-1]`, where `takers[k]` counts the
students that want more than k teachers. These loads form a base polytope, on which the most even loads (least sum of
load²/capacity) are found by splitting at the most violated bound: H. Groenevelt, "Two algorithms for maximizing a
separable concave function over a polymatroid feasible region", European J. of Operational Research 54 (1991).

Read as prices: a teacher's next link costs (2·load + 1)/capacity, the step in load²/capacity. Within a `LoadLevel` all
teachers stop at the same price. Where students want more teachers than there are large teachers, the bound separates
levels: every student takes all it can of an earlier level before it takes anything of a later level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["LoadLevel", "fair_levels"]

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

# The largest ratio of two capacities that prices can still tell apart without overflow.
_SMALLEST_CAPACITY = 1e-290


@dataclass(frozen=True)
class LoadLevel:
    """Teachers `start` to `stop` (in order of falling capacity), with loads from `low` to `high`.

    `high - low` is 0 or 1. Fair are all loads within these bounds whose sum is what the students take here, as far as
    links between different pairs can realize them.
    """

    start: int
    stop: int
    low: Ints
    high: Ints


def fair_levels(capacities: Floats, takers: Ints) -> list[LoadLevel]:
    """Return the levels, in order; every teacher is in a level.

    Args:
        capacities: of n >= 1 teachers, positive, falling.
        takers: takers[k] students want more than k teachers; n entries, never rising.
    """
    _, exponent = np.frexp(capacities[0])
    capacities = np.maximum(np.ldexp(capacities, -int(exponent)), _SMALLEST_CAPACITY)
    pending, levels = [(0, len(capacities))], []
    while pending:
        start, stop = pending.pop()
        part, takes = capacities[start:stop], takers[start:stop]
        low, high = _bounds(part, _price(part, takes), int(takes[0]))
        split = _violated(part, takes, low, high)
        if split:
            pending += [(start + split, stop), (start, start + split)]
        else:
            levels.append(LoadLevel(start, stop, low, high))
    return levels


def _bounds(capacities: Floats, price: float, most: int) -> tuple[Ints, Ints]:
    """Count links that cost less than `price`, and at most `price`, by teacher; never above `most`."""
    high = np.minimum((price * capacities + 1) / 2, most + 1.0).astype(np.int64)
    # The division rounds: make the count agree with the prices as they are computed everywhere else.
    high -= (2 * high - 1) / capacities > price
    high += (2 * high + 1) / capacities <= price
    low = high - ((2 * high - 1) / capacities == price)
    return np.minimum(low, most), np.minimum(high, most)


def _price(capacities: Floats, takers: Ints) -> float:
    """Return the price of the dearest link when links are handed out one by one, always to the cheapest teacher."""
    most, total = int(takers[0]), int(takers.sum())
    if total == 0:
        return 0.0
    below, enough = 0.0, (2 * most - 1) / float(capacities[-1])
    while below < (middle := (below + enough) / 2) < enough:
        if int(_bounds(capacities, middle, most)[1].sum()) >= total:
            enough = middle
        else:
            below = middle
    return enough


def _violated(capacities: Floats, takers: Ints, low: Ints, high: Ints) -> int:
    """Return the number of teachers from the front that got most beyond what students can give them; 0 if none did.

    Judged are the flattest of all loads within the bounds, so that the front, when it got too much, got it in all of
    them. Only borders between capacities need a look: within a run of equal capacities the excess, with its loads
    in falling order, is nowhere larger than at both ends.
    """
    (borders,) = np.nonzero(capacities[1:] != capacities[:-1])
    if not len(borders):
        return 0
    loads = low.copy()
    (optional,) = np.nonzero(high > low)
    loads[optional[len(optional) - (int(takers.sum()) - int(low.sum())) :]] += 1
    excess = np.cumsum(loads - takers)[borders]
    worst = int(np.argmax(excess))
    return int(borders[worst]) + 1 if excess[worst] > 0 else 0
