"""Which nodes are fit to train: who is tested with whom, and what follows from the results. Nothing here is I/O.

Nodes compute alone and reduce in pairs, twice, with different partners, as DLRover's node check does: a pair that fails
has a faulty node in it or a good node that met it; the second round pairs every suspect with a node that passed, so
that the faulty node fails again. `runner` carries it out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["CheckRoundResult", "NodeCheckResult", "first_groups", "second_groups", "summarize_rounds"]

Groups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class CheckRoundResult:
    """The findings of a node in a round.

    Attributes:
        device: "cpu" or "cuda"; times are compared among nodes with the same.
        compute_s: seconds for the fixed work, None if it failed.
        reduce_s: seconds for the all-reduce with the partners, 0 without partners, None if it failed.
        error: why something failed, in words.
    """

    device: str = "cpu"
    compute_s: float | None = None
    reduce_s: float | None = None
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether both the work and the all-reduce succeeded."""
        return self.compute_s is not None and self.reduce_s is not None


@dataclass(frozen=True)
class NodeCheckResult:
    """The nodes that are not fit to train; all others are.

    Attributes:
        faulty: why, by node.
        slow: why, by node.
    """

    faulty: dict[str, str] = field(default_factory=dict)
    slow: dict[str, str] = field(default_factory=dict)


def first_groups(nodes: Sequence[str]) -> Groups:
    """Return pairs of neighbours; of an odd number the last three are a group."""
    groups = [tuple(nodes[at : at + 2]) for at in range(0, len(nodes), 2)]
    if len(groups) > 1 and len(groups[-1]) == 1:
        last = groups.pop()
        groups[-1] += last
    return tuple(groups)


def second_groups(nodes: Sequence[str], first: Mapping[str, CheckRoundResult], factor: float) -> Groups:
    """Pair every suspect with a node that passed, as long as there are such nodes.

    Suspects are all members of a group in which a node failed or was slow. Suspects for whom no partner is left meet
    among themselves; nodes that were silent, and nodes that no suspect needs, work alone.

    Args:
        nodes: all nodes of the check, in the order of the first round.
        first: results of the first round by node; silent nodes are missing.
        factor: how many times the median is slow.

    Returns:
        The groups of the second round, in which every node is once.
    """
    slow = _slow([first], factor)
    bad = [node for node in nodes if node not in slow and node in first and not first[node].passed] + list(slow)
    silent = [node for node in nodes if node not in first]
    touched = {node for group in first_groups(nodes) if {*group} & {*bad, *silent} for node in group}
    answered = bad + [node for node in nodes if node in touched and node not in bad and node not in silent]
    suspects = answered + silent
    # From the other end: the neighbour was the partner of the first round.
    good = [node for node in nodes if node not in suspects][::-1]
    groups = list(zip(good, suspects, strict=False))
    rest = [node for node in suspects[len(good) :] if node in answered]
    half = len(rest) // 2
    groups += zip(rest[:half], rest[half : 2 * half], strict=True)
    met = {node for group in groups for node in group}
    return (*groups, *((node,) for node in nodes if node not in met))


def summarize_rounds(
    nodes: Sequence[str], rounds: Sequence[tuple[Groups, Mapping[str, CheckRoundResult]]], factor: float = 2.0
) -> NodeCheckResult:
    """Find the nodes that are not fit from all rounds.

    A node is faulty if it passed in no round, unless in a round that failed a partner was silent or could not compute,
    which explains the failure. It is slow if even its best time is more than `factor` times the median of all nodes'
    best.

    Args:
        nodes: all nodes of the check.
        rounds: for every round its groups, and the results by node; silent nodes are missing.
        factor: how many times the median is slow.
    """
    faulty = {}
    for node in nodes:
        reasons = []
        for groups, results in rounds:
            partners = next((group for group in groups if node in group), ())
            if node in results and (results[node].passed or _explained(node, partners, results)):
                break
            reasons.append(results[node].error if node in results else "no answer")
        else:
            faulty[node] = "; ".join(dict.fromkeys(reasons))
    slow = _slow([results for _, results in rounds], factor)
    return NodeCheckResult(faulty, {node: why for node, why in slow.items() if node not in faulty})


def _explained(node: str, partners: Sequence[str], results: Mapping[str, CheckRoundResult]) -> bool:
    """Return whether a node that could compute failed to reduce because of a partner: silent, or unable to compute."""
    return results[node].compute_s is not None and any(
        partner not in results or results[partner].compute_s is None for partner in partners
    )


def _slow(rounds: Sequence[Mapping[str, CheckRoundResult]], factor: float) -> dict[str, str]:
    slow: dict[str, str] = {}
    for part in ("compute", "reduce"):
        best: dict[str, dict[str, float]] = {}  # by device
        for results in rounds:
            for node, result in results.items():
                seconds = result.compute_s if part == "compute" else result.reduce_s
                if seconds:
                    times = best.setdefault(result.device, {})
                    times[node] = min(seconds, times.get(node, seconds))
        for device, times in best.items():
            usual_s = statistics.median_low(times.values())  # of two the faster, else the slower could not be slow
            for node, seconds in times.items():
                if seconds > factor * usual_s:
                    why = f"{part} on {device} took {seconds:.3g} s, the median of all nodes is {usual_s:.3g} s"
                    slow[node] = f"{slow[node]}; {why}" if node in slow else why
    return slow
