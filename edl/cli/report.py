"""`edl report`: draw what a job's nodes did and when, the job's progress, and its goodput.

Within a span of a node's time, categories are stacked by their share. In the file, areas are thus amounts of time, and
frequent short saves form a thin stripe along a long bar. matplotlib is imported only for drawing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.text import Text

from edl.cli.output import console, printable
from edl.collective.goodput import JobSummary, Span, TimeCategory, read_job
from edl.command_line import CommandParser
from edl.discovery import open_store
from edl.errors import SettingsError
from edl.settings import DiscoverySettings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# One letter for each state, for files and terminals without colours.
_LETTERS = {
    TimeCategory.TRAIN: "━",
    TimeCategory.SAVE: "s",
    TimeCategory.LOAD: "l",
    TimeCategory.ROLLBACK: "r",
    TimeCategory.RENDEZVOUS: "m",
    TimeCategory.IDLE: "·",
    TimeCategory.DOWN: "x",
}
_COLOURS: Final[Mapping[TimeCategory, str]] = {
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
_NAME_WIDTH = 20
"""Characters shown of a node's name: its end distinguishes nodes, and the timeline needs the rest of the line."""
_MAX_ROWS = 20
"""Maximum number of nodes, and of events, so that the report fits on a screen or two."""
_MAX_DRAWN: Final = 40
"""Maximum number of nodes in the file: about 12 inches, one page."""
_WIDTH = 120
"""Characters per line if the output is not a terminal."""
_FORMATS: Final = (".png", ".svg", ".pdf")

_DESCRIPTION = """\
Draws a chart of an elastic job from its ledger, during or after the run: a row of states for each node, what happened
when, and the goodput (the share of wall-clock time spent on steps, not counting repetitions of lost steps). In the
terminal, each column shows only the state that took most of the time; the --out file shows all states, and steps."""

_EXAMPLES = """\
examples:
  edl report myjob                        in the terminal
  edl report myjob --out myjob.png        also a picture (.png, .svg or .pdf)
  edl report myjob --store consul://10.0.0.7:8500"""


def main(argv: Sequence[str]) -> int:
    """Run `edl report`."""
    parser = CommandParser("edl report", _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("job", metavar="JOB", help="name of the job (`edl run --rdzv-id`); on Kubernetes, its id")
    parser.add_store_option()
    add("--out", type=Path, metavar="FILE", help="write a picture: .png, .svg or .pdf")
    options = parser.parse_args(argv)
    with open_store(DiscoverySettings.of(options.store).url) as store:
        summary = read_job(store, options.job)
    if not summary.elapsed_s:
        raise SettingsError(f"job {options.job!r} has no ledger yet: its agents have just started")
    if options.out is not None:
        _draw_picture(summary, options.out)
    screen = console(_WIDTH)
    _print_timeline(summary, screen)
    _print_events(summary, screen)
    if options.out is not None:
        screen.print(Text(printable(f"The picture is in {options.out}")))
    return 0


def _time_unit(elapsed_s: float) -> tuple[str, float]:
    """Return the unit for a time axis of this length, and the unit's length in seconds."""
    if elapsed_s < 10 * 60:
        return "seconds", 1.0
    return ("minutes", 60.0) if elapsed_s < 5 * 3600 else ("hours", 3600.0)


def _headline(summary: JobSummary) -> str:
    unit, unit_s = _time_unit(summary.elapsed_s)
    known = "goodput unknown (no steps reported)" if summary.goodput is None else f"goodput {summary.goodput:.1%}"
    return f"job {summary.job}: {summary.state}, {known} of {summary.elapsed_s / unit_s:.3g} {unit}"


def _rows(summary: JobSummary, most: int) -> list[tuple[str, float, Sequence[Span]]]:
    """Return the name, start (seconds after the job's start) and spans of the job, then of its latest nodes."""
    nodes = sorted(summary.nodes, key=lambda node: node.began)[-most:]
    rows = [(node.node, node.began - summary.began, node.record.spans) for node in nodes]
    return [("the job", 0.0, summary.spans), *rows]


# --- In the terminal ---


def _print_timeline(summary: JobSummary, console: Console) -> None:
    console.print(Text(printable(_headline(summary)), "bold"))
    for state, (name, seconds) in zip(TimeCategory, summary.seconds.items(), strict=True):
        if seconds:
            part = f"{_LETTERS[state]} {name:<10} {seconds / summary.elapsed_s:7.2%} {seconds:10.2f} s"
            console.print(Text(part, _COLOURS[state]))
    width = max(20, min(console.width, _WIDTH) - _NAME_WIDTH - 1)
    for name, begin_s, spans in _rows(summary, _MAX_ROWS):
        line = Text(printable(name)[-_NAME_WIDTH:].rjust(_NAME_WIDTH) + " ")
        for column in _main_categories(spans, begin_s, summary.elapsed_s / width, width):
            line.append(" " if column is None else _LETTERS[column], None if column is None else _COLOURS[column])
        console.print(line)


def _main_categories(spans: Sequence[Span], begin_s: float, width_s: float, count: int) -> list[TimeCategory | None]:
    """Return the main category of each of `count` columns, None if spans cover less than half of the column."""
    sums = [[0.0] * len(TimeCategory) for _ in range(count)]
    for span in spans:
        end_s = begin_s + span.length_us / 1e6
        for column in range(max(0, int(begin_s / width_s)), min(count, int(end_s / width_s) + 1)):
            overlap_s = max(0.0, min(end_s, (column + 1) * width_s) - max(begin_s, column * width_s))
            for state in TimeCategory:
                sums[column][state] += overlap_s * span.amounts[state] / max(1, span.length_us)
        begin_s = end_s
    return [max(TimeCategory, key=lambda state: parts[state]) if 2 * sum(parts) > width_s else None for parts in sums]


def _print_events(summary: JobSummary, console: Console) -> None:
    unit, unit_s = _time_unit(summary.elapsed_s)
    for event in summary.events[-_MAX_ROWS:]:
        at = (event.at - summary.began) / unit_s
        console.print(Text(printable(f"{at:10.2f} {unit[0]}  {event.kind:<10}  {event.node}  {event.text}".rstrip())))


# --- In a file ---


def _draw_picture(summary: JobSummary, path: Path) -> None:
    if path.suffix.lower() not in _FORMATS:
        raise SettingsError(f"{str(path)!r}: a picture's name must end in {', '.join(_FORMATS)}")
    from matplotlib.figure import Figure

    rows = _rows(summary, _MAX_DRAWN)
    height = 0.6 + 0.3 * len(rows)
    figure = Figure(figsize=(11, 3.8 + height), dpi=150, layout="constrained")
    figure.suptitle(_headline(summary), x=0.01, ha="left", fontsize=13, fontweight="bold", parse_math=False)
    top, middle, bottom = figure.subplots(3, 1, height_ratios=[0.35, height, 2.2])
    middle.sharex(bottom)
    _draw_totals(top, summary)
    _draw_timeline(middle, summary, rows)
    _draw_progress(bottom, summary)
    try:
        figure.savefig(path)
    except OSError as exc:
        raise SettingsError(f"the picture cannot be written to {str(path)!r}: {exc.strerror}") from exc


def _draw_totals(axes: Axes, summary: JobSummary) -> None:
    left = 0.0
    for state, (name, seconds) in zip(TimeCategory, summary.seconds.items(), strict=True):
        share = seconds / summary.elapsed_s
        if share:
            label = f"{name} {share:.1%}" if share >= 0.001 else f"{name} <0.1%"
            axes.barh(0, share, left=left, color=_COLOURS[state], label=label)
            left += share
    axes.set(xlim=(0, 1), xticks=[])
    axes.set_yticks([0], ["in all"], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(TimeCategory), frameon=False, fontsize=9)


def _draw_timeline(axes: Axes, summary: JobSummary, rows: Sequence[tuple[str, float, Sequence[Span]]]) -> None:
    _, unit_s = _time_unit(summary.elapsed_s)
    for place, (_, begin_s, spans) in enumerate(rows):
        _draw_row(axes, place, begin_s, spans, unit_s)
    places = {name: place for place, (name, _, _) in enumerate(rows)}
    happened = [(event.at, event.node, event.kind) for event in summary.events]
    # A lost agent could not record its own loss.
    happened += [(node.record.until_us / 1e6, node.node, "lost") for node in summary.nodes if node.state == "lost"]
    for kind in dict.fromkeys(kind for _, _, kind in happened):
        marker, colour = _MARKERS.get(kind, (".", _NEUTRAL))
        found = [(at, node) for at, node, other in happened if other == kind]
        axes.plot(
            [(at - summary.began) / unit_s for at, _ in found],
            [0 if kind == "generation" else places.get(node, 0) for _, node in found],
            linestyle="none",
            marker=marker,
            markersize=7,
            color=colour,
            markeredgecolor="white" if marker not in "|x" else colour,
            markeredgewidth=0.8,
            label=kind,
            zorder=3,
            clip_on=False,
        )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    names = [name if len(name) <= 24 else f"…{name[-23:]}" for name, _, _ in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8, parse_math=False)
    axes.get_yticklabels()[0].set_fontweight("bold")
    axes.tick_params(axis="x", labelbottom=False)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if happened:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)


def _draw_row(axes: Axes, place: int, begin_s: float, spans: Sequence[Span], unit_s: float) -> None:
    """Stack the categories of each span by their share, as steps along the time axis."""
    edges = [begin_s / unit_s]
    for span in spans:
        edges.append(edges[-1] + span.length_us / 1e6 / unit_s)
    height = 0.62 if place else 0.85
    low = place + height / 2  # the y-axis points down
    for state in reversed(TimeCategory):  # each covers the lower part of the previous one, so there are no gaps
        if any(span.amounts[state] for span in spans):
            tops = [low - height * sum(span.amounts[: state + 1]) / span.length_us for span in spans]
            axes.fill_between(edges, low, [*tops, tops[-1]], step="post", color=_COLOURS[state], linewidth=0)


def _draw_progress(axes: Axes, summary: JobSummary) -> None:
    from matplotlib.ticker import MaxNLocator

    unit, unit_s = _time_unit(summary.elapsed_s)
    for node in summary.nodes:
        marks = [mark for mark in node.record.marks if mark.step >= 0]
        times = [(node.began - summary.began + mark.at_us / 1e6) / unit_s for mark in marks]
        axes.plot(times, [mark.step for mark in marks], color="#2f4b7c", linewidth=1.3, alpha=0.8)
    axes.set(xlim=(0, summary.elapsed_s / unit_s), xlabel=f"{unit} since the job began", ylim=(0, None))
    axes.set_ylabel("last step", color="#2f4b7c")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.spines[["top"]].set_visible(False)
    size = axes.twinx()
    edges = [0.0]
    for span in summary.spans:
        edges.append(edges[-1] + span.length_us / 1e6 / unit_s)
    sizes = [span.workers if span.running else 0 for span in summary.spans]
    size.stairs(sizes, edges, fill=True, color="#9d755d", alpha=0.18)
    size.set_ylabel("running ranks", color="#9d755d")
    size.set_ylim(0, 1.6 * max([1, *sizes]))
    size.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    size.spines[["top"]].set_visible(False)
