"""Draws a picture of a job: a timeline for every node, its progress, and where the time went.

matplotlib is imported only when something is drawn. Within a span the categories are stacked by their share: frequent
short saves are a thin stripe along a long bar, and areas are amounts of time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edl.collective.goodput.ledger import Event, Span, TimeCategory
from edl.collective.goodput.summary import NodeRow, Summary
from edl.errors import SettingsError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "choose_time_unit", "draw_report", "main_categories"]

COLOURS: Final[Mapping[TimeCategory, str]] = {
    TimeCategory.TRAIN: "#59a14f",
    TimeCategory.SAVE: "#4e79a7",
    TimeCategory.LOAD: "#76b7d2",
    TimeCategory.ROLLBACK: "#edc948",
    TimeCategory.RENDEZVOUS: "#b07aa1",
    TimeCategory.IDLE: "#bab0ac",
    TimeCategory.DOWN: "#922b21",
}
_BAD, _GOOD, _NEUTRAL = "#c0392b", "#1e8449", "#555555"
# The marker and colour of an event; other kinds are dots.
_MARKERS: Final[Mapping[str, tuple[str, str]]] = {
    "join": ("^", _GOOD),
    "leave": ("v", "#d35400"),
    "kill": ("X", _BAD),
    "lost": ("X", _BAD),
    "exit": ("x", _BAD),
    "error": ("x", _BAD),
    "hang": ("s", _BAD),
    "restart": ("o", _NEUTRAL),
    "generation": ("|", "#000000"),
}
_MAX_ROWS: Final = 40  # about 12 inches of picture, which is a page
_FORMATS: Final = (".png", ".svg", ".pdf")


def choose_time_unit(elapsed_us: int) -> tuple[str, float]:
    """Return the unit for a time axis of this length, and its length in microseconds."""
    if elapsed_us < 10 * 60e6:
        return "seconds", 1e6
    return ("minutes", 60e6) if elapsed_us < 5 * 3600e6 else ("hours", 3600e6)


def main_categories(
    spans: Sequence[Span], at_us: int, began_us: int, until_us: int, count: int
) -> list[TimeCategory | None]:
    """Return the main category of each of `count` equal parts of the time from `began_us` to `until_us` (wall clocks).

    The first span begins at `at_us`. A part that the spans cover by less than half is None.
    """
    sums = [[0.0] * len(TimeCategory) for _ in range(count)]
    width_us = (until_us - began_us) / count
    start_us = at_us - began_us
    for span in spans:
        end_us = start_us + span.length_us
        for column in range(max(0, int(start_us / width_us)), min(count, int(end_us / width_us) + 1)):
            overlap_us = min(end_us, (column + 1) * width_us) - max(start_us, column * width_us)
            for state in TimeCategory:
                sums[column][state] += max(0.0, overlap_us) * span.amounts[state] / max(1, span.length_us)
        start_us = end_us
    return [max(TimeCategory, key=lambda state: parts[state]) if 2 * sum(parts) > width_us else None for parts in sums]


def draw_report(summary: Summary, path: Path) -> None:
    """Write the picture of a job to a file, whose suffix chooses the format: .png, .svg or .pdf.

    Raises:
        SettingsError: The name has another suffix, the file cannot be written, or the job has no time to show.
    """
    if path.suffix.lower() not in _FORMATS:
        raise SettingsError(f"{str(path)!r}: a picture's name ends in {', '.join(_FORMATS)}")
    if not summary.ledger.elapsed_us:
        raise SettingsError(f"job {summary.job!r} has no ledger yet: there is nothing to draw")
    from matplotlib.figure import Figure

    rows = sorted(summary.nodes, key=lambda row: row.record.began_us)[-_MAX_ROWS:]
    timeline = 0.9 + 0.3 * len(rows)
    figure = Figure(figsize=(11, 3.8 + timeline), dpi=150, layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, height_ratios=[0.35, timeline, 2.2])
    middle.sharex(bottom)
    _title(figure, summary)
    _draw_amounts(top, summary)
    _draw_timeline(middle, summary, rows)
    _draw_progress(bottom, summary)
    try:
        figure.savefig(path)
    except OSError as exc:
        raise SettingsError(f"the picture cannot be written to {str(path)!r}: {exc.strerror}") from exc


def _title(figure: Figure, summary: Summary) -> None:
    unit, unit_us = choose_time_unit(summary.ledger.elapsed_us)
    share = f"goodput {summary.ledger.goodput or 0.0:.1%}" if summary.steps_known else "no steps reported"
    text = f"job {summary.job}: {share} of {summary.ledger.elapsed_us / unit_us:.3g} {unit}"
    figure.suptitle(text, x=0.01, horizontalalignment="left", fontsize=13, fontweight="bold", parse_math=False)


def _draw_amounts(axes: Axes, summary: Summary) -> None:
    """Draw one bar of the whole elapsed time by category, with the shares in the legend."""
    elapsed_us = summary.ledger.elapsed_us
    left = 0.0
    for state in TimeCategory:
        share = summary.ledger.amounts[state] / elapsed_us
        if not share:
            continue
        label = f"{state.name.lower()} {share:.1%}" if share >= 0.001 else f"{state.name.lower()} <0.1%"
        axes.barh(0, share, left=left, color=COLOURS[state], label=label)
        left += share
    axes.set(xlim=(0, 1), xticks=[])
    axes.set_yticks([0], ["in all"], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=len(TimeCategory), frameon=False, fontsize=9, borderpad=0
    )


def _draw_timeline(axes: Axes, summary: Summary, rows: Sequence[NodeRow]) -> None:
    ledger = summary.ledger
    _, unit_us = choose_time_unit(ledger.elapsed_us)
    places: dict[str, float] = {}
    _draw_row(axes, 0.0, 0, ledger.spans, unit_us, height=0.85)
    events = list(summary.events)
    for place, row in enumerate(rows, start=1):
        _draw_row(axes, place, row.record.began_us - ledger.began_us, row.record.spans, unit_us, height=0.62)
        places[row.node] = place
        if row.state == "lost":  # its agent could not record that itself
            events.append(Event(row.record.until_us, row.node, "lost"))
    drawn: set[str] = set()
    for event in events:
        marker, colour = _MARKERS.get(event.kind, (".", _NEUTRAL))
        at = (event.at_us - ledger.began_us) / unit_us
        label = event.kind if event.kind not in drawn else None
        drawn.add(event.kind)
        axes.plot(
            at,
            0.0 if event.kind == "generation" else places.get(event.node, 0.0),
            linestyle="none",
            marker=marker,
            markersize=7,
            color=colour,
            markeredgecolor="white" if marker not in "|x" else colour,
            markeredgewidth=0.8,
            label=label,
            zorder=3,
            clip_on=False,
        )
    axes.set_ylim(len(rows) + 0.6, -0.6)
    names = [row.node if len(row.node) <= 24 else f"…{row.node[-23:]}" for row in rows]
    axes.set_yticks(range(len(rows) + 1), ["the job", *names], fontsize=8, parse_math=False)
    axes.get_yticklabels()[0].set_fontweight("bold")
    axes.tick_params(axis="x", labelbottom=False)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if drawn:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)


def _draw_row(axes: Axes, place: float, at_us: int, spans: Iterable[Span], unit_us: float, height: float) -> None:
    from matplotlib.collections import PolyCollection

    shapes: dict[TimeCategory, list[list[tuple[float, float]]]] = {state: [] for state in TimeCategory}
    for span in spans:
        left, right = at_us / unit_us, (at_us + span.length_us) / unit_us
        low = place + height / 2  # the y-axis points down
        for state in TimeCategory:
            if not span.amounts[state]:
                continue
            high = low - height * span.amounts[state] / span.length_us
            shapes[state].append([(left, low), (right, low), (right, high), (left, high)])
            low = high
        at_us += span.length_us
    for state, polygons in shapes.items():
        # Edges of the same colour, since otherwise the background shows through between neighbours.
        axes.add_collection(PolyCollection(polygons, facecolor=COLOURS[state], edgecolor=COLOURS[state], linewidth=0.4))


def _draw_progress(axes: Axes, summary: Summary) -> None:
    from matplotlib.ticker import MaxNLocator

    ledger = summary.ledger
    unit, unit_us = choose_time_unit(ledger.elapsed_us)
    for row in summary.nodes:
        base_us = row.record.began_us - ledger.began_us
        marks = [mark for mark in row.record.marks if mark.step >= 0]
        times = [(base_us + mark.at_us) / unit_us for mark in marks]
        axes.plot(times, [mark.step for mark in marks], color="#2f4b7c", linewidth=1.3, alpha=0.8)
    axes.set(xlim=(0, ledger.elapsed_us / unit_us), xlabel=f"{unit} since the job began", ylim=(0, None))
    axes.set_ylabel("last step", color="#2f4b7c")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.spines[["top"]].set_visible(False)
    size = axes.twinx()
    edges, sizes = [0.0], []
    for span in ledger.spans:
        edges.append(edges[-1] + span.length_us / unit_us)
        sizes.append(span.workers if span.running else 0)
    size.stairs(sizes, edges, fill=True, color="#9d755d", alpha=0.18)
    size.set_ylabel("ranks that run", color="#9d755d")
    most = max([1, *sizes])
    size.set_ylim(0, 1.6 * most)
    size.set_yticks([tick for tick in MaxNLocator(nbins=4, integer=True).tick_values(0, most) if tick <= most])
    size.spines[["top"]].set_visible(False)
