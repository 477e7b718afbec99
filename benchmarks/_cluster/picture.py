"""The picture of a simulated day: GPUs in use, waiting jobs, and moves, under every policy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks._cluster.simulation import Result

__all__ = ["draw_day"]

_COLOURS = {"EDL": "#1b6ca8", "gang": "#c44e52", "gang at the minimum": "#dd8f5a", "ancestor": "#7a6a9b"}
_SMOOTH_S = 900.0  # means of a quarter of an hour: single ticks would fill the plot with ink


def draw_day(results: Sequence[Result], path: Path) -> None:
    """Draw the day into a PNG file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(9, 9), sharex=True, height_ratios=[2, 1.2, 1], layout="constrained")
    usage, waiting, moving = axes
    hours, capacity = _means(results[0], "capacity")
    usage.fill_between(hours, capacity, color="#e8e8e8", label="GPUs that the online load leaves")
    for result in results:
        colour = _COLOURS[result.policy]
        usage.plot(hours, _means(result, "useful")[1], color=colour, label=f"{result.policy}: in jobs that make steps")
        waiting.plot(hours, _means(result, "waiting_jobs")[1], color=colour, label=result.policy)
        counts, edges = _moves(result)
        moving.stairs(counts, edges, color=colour, label=result.policy)
    usage.set_ylabel("GPUs")
    usage.set_ylim(bottom=0)
    usage.legend(loc="lower right", fontsize=8)
    waiting.set_ylabel("jobs that wait")
    waiting.legend(loc="upper left", fontsize=8)
    moving.set_ylabel("moves an hour")
    moving.set_xlabel("hour of the day")
    moving.set_xlim(0, hours[-1])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.5)
        axis.set_axisbelow(True)
    figure.suptitle("A simulated day of a cluster")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _means(result: Result, what: str) -> tuple[list[float], list[float]]:
    """Return hours, and means over a quarter of an hour."""
    buckets: dict[int, list[float]] = {}
    for sample in result.samples:
        value = sample.jobs - sample.pausing if what == "useful" else getattr(sample, what)
        buckets.setdefault(int(sample.at_s / _SMOOTH_S), []).append(value)
    return (
        [(number + 0.5) * _SMOOTH_S / 3600 for number in sorted(buckets)],
        [sum(buckets[number]) / len(buckets[number]) for number in sorted(buckets)],
    )


def _moves(result: Result) -> tuple[list[int], list[float]]:
    """Return the moves in each hour, and the borders of the hours."""
    last = max(1, round(result.samples[-1].at_s / 3600))
    edges = [float(hour) for hour in range(last + 1)]
    counts = [sum(start * 3600 <= at < end * 3600 for at in result.moves) for start, end in pairwise(edges)]
    return counts, edges
