"""The picture of two jobs that share GPUs: busy workers over time, with elastic and with all-or-nothing jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks._kube.sharing import GPUS, JobTimes, Sharing

__all__ = ["count_busy", "draw_sharing"]

_COLOURS = {"first": "#7a6a9b", "second": "#1b6ca8"}
_STEP_S = 0.25


def count_busy(job: JobTimes, times: Sequence[float]) -> list[int]:
    """Return how many of a job's workers are busy at each time, in seconds since the epoch."""
    return [sum(begin <= at < end for begin, end in job.units) for at in times]


def draw_sharing(sides: Mapping[str, Sharing], path: Path) -> None:
    """Draw the busy GPUs over time into a PNG file, with a row for each side."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    longest = max(sharing.span_s for sharing in sides.values())
    figure, rows = plt.subplots(len(sides), 1, figsize=(9, 2.7 * len(sides)), sharex=True, layout="constrained")
    for axis, (name, sharing) in zip(rows, sides.items(), strict=True):
        seconds = [number * _STEP_S for number in range(int((longest + 2) / _STEP_S))]
        times = [sharing.begin + at for at in seconds]
        busy = [count_busy(job, times) for job in (sharing.first, sharing.second)]
        axis.stackplot(
            seconds, *busy, colors=list(_COLOURS.values()), labels=["first job", "second job"], step="post", linewidth=0
        )
        come = sharing.second.submitted - sharing.begin
        axis.axvline(come, color="#333333", linewidth=1, linestyle=":")
        axis.annotate(
            "the second job comes", (come, GPUS), (4, 4), textcoords="offset points", fontsize=8, color="#333333"
        )
        axis.set_title(
            f"{name}: {sharing.utilization:.0%} of the GPUs' time, the second job waits {sharing.second.wait_s:.0f} s",
            fontsize=10,
            loc="left",
            pad=18,
        )
        axis.set_ylabel("GPUs that work")
        axis.set_ylim(0, GPUS)
        axis.set_yticks(range(GPUS + 1))
        axis.set_xlim(0, longest + 2)
        axis.spines[["top", "right"]].set_visible(False)
    rows[-1].set_xlabel("seconds since the first job began to work")
    rows[0].legend(loc="upper right", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
