"""What the demo shows while it runs and at its end: lines and bars, a timeline, pictures and tables."""

from __future__ import annotations

import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from edl.background import BackgroundLoop
from edl.cli.demo.models import DemoPlan, Findings
from edl.cli.output import table
from edl.distill import ReaderStats

Bar: TypeAlias = Callable[[int, str], None]
"""Shows how much of a step is done, and a text."""

EVENT_STYLES = {"kill": "bold red", "join": "bold green", "drain": "bold yellow"}

# Not a terminal: a line of progress so often.
_PLAIN_S = 5.0


class Screen:
    """Prints for people. `console` is rich's."""

    def __init__(self, console: Console | None = None) -> None:
        # Not a terminal: lines must not be wrapped at a width that nobody has.
        self.console = console or Console(highlight=False, width=None if sys.stdout.isatty() else 110)
        self._step = 0

    def step(self, text: str) -> None:
        """Say what comes next."""
        self._step += 1
        self.console.print(Text(f"{self._step}. {text}", "bold"))

    def say(self, text: str, style: str = "") -> None:
        """Something about the present step."""
        self.console.print(Text(f"   {text}", style))

    def event(self, kind: str, text: str) -> None:
        """Something that happens to a teacher."""
        self.say(f"{kind.upper():<5} {text}", EVENT_STYLES[kind])

    @contextmanager
    def words_of(self, logger: str) -> Iterator[None]:
        """Show what the library itself logs meanwhile."""
        handler, log = _Words(self), logging.getLogger(logger)
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)

    @contextmanager
    def bar(self, total: int) -> Iterator[Bar]:
        """Progress towards `total`; `say` and `event` print above it."""
        if not self.console.is_terminal:
            next_s = time.monotonic() + _PLAIN_S

            def show_line(done: int, text: str) -> None:
                nonlocal next_s
                if time.monotonic() >= next_s:
                    next_s = time.monotonic() + _PLAIN_S
                    self.say(f"{done / total:4.0%}  {text}")

            yield show_line
            return
        columns = (
            TextColumn("  "),
            BarColumn(bar_width=28),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
        )
        with Progress(*columns, console=self.console, transient=True, refresh_per_second=8) as progress:
            task = progress.add_task("", total=total)
            yield lambda done, text: progress.update(task, completed=done, description=text)


class _Words(logging.Handler):
    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        self._screen.say(f"{record.name}: {record.getMessage()}", "dim")


# --- What happens when ---

Kind = Literal["kill", "join", "drain"]

_SAMPLE_S = 0.1
"""Between two looks at the counters: the picture's bins of half a second hold five."""


@dataclass(frozen=True)
class TeacherEvent:
    """At `at_s` seconds of the epoch, `kind` happened to `teacher`."""

    at_s: float
    kind: Kind
    teacher: str


@dataclass(frozen=True)
class Rates:
    """Rows a second, by bin of time.

    Attributes:
        at_s: middles of the bins in seconds of the epoch.
        delivered: to the students.
        served: by teacher, in the order in which they appeared.
    """

    at_s: np.ndarray[Any, Any]
    delivered: np.ndarray[Any, Any]
    served: dict[str, np.ndarray[Any, Any]]


class Timeline:
    """Reads counters in a thread of its own, from `start` to `stop`."""

    def __init__(self, stats: Callable[[], ReaderStats]) -> None:
        self._stats = stats
        self._samples: list[tuple[float, ReaderStats]] = []
        self._sampling: BackgroundLoop | None = None
        self._began = time.monotonic()
        self.events: list[TeacherEvent] = []

    def __enter__(self) -> Timeline:
        self._began = time.monotonic()
        self._sample()  # here, since the thread may get its first turn late
        self._sampling = BackgroundLoop("edl-demo-timeline", self._sample)
        return self

    def __exit__(self, *_: object) -> None:
        if self._sampling is not None:
            self._sampling.close()
        self._sample()

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    @property
    def end_s(self) -> float:
        """When the last sample was taken, in seconds since the start."""
        return self._samples[-1][0] if self._samples else 0.0

    def mark(self, kind: Kind, teacher: str) -> None:
        """Something happens now."""
        self.events.append(TeacherEvent(self.now_s, kind, teacher))

    def rates(self, bin_s: float) -> Rates:
        """Return rates in bins of `bin_s` seconds, without the last, incomplete bin."""
        times = np.array([at for at, _ in self._samples])
        edges = np.arange(0.0, times[-1], bin_s)
        names: dict[str, None] = {}
        for _, stats in self._samples:
            names.update(dict.fromkeys(stats.teachers))

        def rate(values: list[int]) -> np.ndarray[Any, Any]:
            rates: np.ndarray[Any, Any] = np.diff(np.interp(edges, times, values)) / bin_s
            return rates

        served = {
            name: rate([stats.teachers[name].rows if name in stats.teachers else 0 for _, stats in self._samples])
            for name in names
        }
        return Rates(edges[:-1] + bin_s / 2, rate([stats.rows_delivered for _, stats in self._samples]), served)

    def _sample(self) -> float:
        self._samples.append((self.now_s, self._stats()))
        return _SAMPLE_S


# --- Pictures ---

_COLOURS = ("#4c78a8", "#72b7b2", "#eeca3b", "#b279a2", "#9d755d", "#83bcb6")
_EVENT_COLOURS = {"kill": "#d62728", "join": "#2ca02c", "drain": "#e08214"}
_TERMINAL_COLOURS = {"kill": "red", "join": "green", "drain": "orange"}
_EVENT_WORDS = {"kill": "killed (SIGKILL)", "join": "joins", "drain": "drains (SIGTERM)"}


def draw_picture(timeline: Timeline, path: Path, what: str) -> None:
    """Write the picture to `path`: rows a second by teacher, stacked. `what` begins the title."""
    from matplotlib.figure import Figure

    rates = timeline.rates(0.5)
    figure = Figure(figsize=(10, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.stackplot(
        rates.at_s,
        *rates.served.values(),
        labels=list(rates.served),
        colors=[_COLOURS[index % len(_COLOURS)] for index in range(len(rates.served))],
        alpha=0.85,
    )
    axes.plot(rates.at_s, rates.delivered, color="#222222", linewidth=1.6, label="into the training loop")
    top = 1.32 * max(1.0, float(np.max(sum(rates.served.values(), np.zeros_like(rates.at_s)))))
    for row, event in enumerate(timeline.events):
        colour = _EVENT_COLOURS[event.kind]
        axes.axvline(event.at_s, color=colour, linewidth=1.6, linestyle="--")
        axes.annotate(
            f"{event.teacher} {_EVENT_WORDS[event.kind]}",
            (event.at_s, top),
            xytext=(5, -6 - 15 * row),
            textcoords="offset points",
            verticalalignment="top",
            color=colour,
            fontsize=9,
            fontweight="bold",
            bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.5},  # over other events' lines
        )
    axes.set(xlim=(0, timeline.end_s), ylim=(0, top), xlabel="seconds of the epoch", ylabel="soft labels a second")
    axes.set_title(f"{what}, each labelled once and in order, while teachers come and go", loc="left", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    figure.legend(loc="outside lower center", fontsize=9, frameon=False, ncols=len(rates.served) + 1)
    figure.savefig(path)


def show_picture(timeline: Timeline, console: Console) -> None:
    """Draw into the terminal: rows a second, and a line for every event."""
    import plotext

    rates = timeline.rates(0.5)
    highest = max(1.0, float(rates.delivered.max(initial=0.0)))
    top = 1.5 * highest
    figure = plotext.figure
    figure.clear()
    columns = min(console.width, 100)
    figure.plot_size(columns, 20)
    figure.title("soft labels a second into the training loop, by seconds of the epoch")
    figure.ruler("x").lim(0, timeline.end_s)
    figure.ruler("y").lim(0, top)
    ticks = np.arange(0.0, highest, _round_step(highest / 4))
    figure.ruler("y").ticks(list(ticks), [f"{tick:,.0f}" for tick in ticks])
    curve = figure.signal(list(rates.at_s), list(rates.delivered), marker=plotext.marker("hd", "cyan"))
    figure.draw(curve.lines().fillx())
    for row, event in enumerate(timeline.events):
        colour = _TERMINAL_COLOURS[event.kind]
        figure.line(event.at_s, "vertical", pixel=colour)
        height = (1.44 - 0.12 * row) * highest  # a row for each, since two may happen at nearly the same time
        words = f" {event.kind} {event.teacher}"
        latest_s = timeline.end_s * (1 - len(words) / max(1, columns - 10))  # behind it they would be cut at the edge
        figure.draw(figure.text(max(0.0, min(event.at_s, latest_s)), height, plotext.colorize(words, colour)))
    picture = figure.build().string(colorless=not console.is_terminal)
    console.print(Text.from_ansi(picture))


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ... that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)


# --- Tables ---


@dataclass(frozen=True)
class DemoResult:
    """The demo's figures. Accuracies are shares of the held-out images; of students, by seed.

    Attributes:
        exit_codes: of the teachers that were killed or drained; None: still running after its time.
        took_s: the epoch, `whole_s` the demo.
    """

    plan: DemoPlan
    teacher_parameters: int
    student_parameters: int
    teacher_images: int
    test_images: int
    teacher: float
    alone: tuple[float, ...]
    distilled: tuple[float, ...]
    stats: ReaderStats
    events: tuple[TeacherEvent, ...]
    exit_codes: dict[str, int | None]
    findings: Findings
    took_s: float
    whole_s: float

    def write(self, path: Path) -> None:
        """As JSON."""
        fields = {**asdict(self), "all_well": self.findings.all_well}
        path.write_text(json.dumps(fields, indent=1, default=str) + "\n")


def show_result(result: DemoResult, console: Console) -> None:
    """Print the tables."""
    console.print()
    console.print(_accuracies(result))
    console.print(_comparison(result))
    console.print()
    console.print(_samples(result))
    console.print(_teachers(result))


def _table(title: str, *columns: str) -> Table:
    found = table(*columns, numbers=columns[1:])
    found.title, found.title_justify, found.title_style = title, "left", "bold"
    return found


def _accuracies(result: DemoResult) -> Table:
    title = f"Right on {result.test_images} images that none of them has seen"
    table = _table(title, "", "parameters", "learned from", "mean", "lowest to highest")

    def row(name: str, parameters: int, learned: str, values: Sequence[float], style: str = "") -> None:
        many = len(values) > 1
        mean = f"{statistics.fmean(values):.1%}" + (f" ±{100 * statistics.stdev(values):.1f}" if many else "")
        table.add_row(
            name,
            f"{parameters:,}",
            learned,
            mean,
            f"{min(values):.1%} to {max(values):.1%}" if many else "",
            style=style,
        )

    row("teacher", result.teacher_parameters, f"{result.teacher_images:,} images, labels", [result.teacher])
    small = result.student_parameters
    row("student alone", small, f"{result.plan.labelled} images, labels", result.alone)
    row("student distilled", small, "the same, soft labels", result.distilled, "bold green")
    return table


def _comparison(result: DemoResult) -> Text:
    plan = result.plan
    gains = [soft - hard for soft, hard in zip(result.distilled, result.alone, strict=True)]
    return Text(
        f"{plan.seeds} seeds. Of each, both students start with the same weights and take {plan.steps} steps\n"
        "on the same distorted images; only the labels differ. Distilled beats alone by\n"
        f"{100 * statistics.fmean(gains):.1f} points ({100 * min(gains):+.1f} to {100 * max(gains):+.1f})."
    )


def _samples(result: DemoResult) -> Table:
    stats, findings = result.stats, result.findings
    table = _table(f"Samples, in {result.took_s:.0f} s", "", "", "")
    table.show_header = False
    table.columns[2].justify = "left"

    def row(name: str, value: int, note: str = "") -> None:
        table.add_row(name, f"{value:,}", note)

    def verdict(name: str, wrong: int, note: str = "") -> None:
        sign, style = ("✗", "bold red") if wrong else ("✓", "green")
        table.add_row(name, f"{wrong:,}", Text(f"{sign} {note}", style))

    row("asked of teachers", stats.rows_asked)
    row("received", stats.rows_received)
    row("resent", stats.rows_resent, "were with a teacher that went away")
    row("hedged", stats.rows_hedged, "were late, so a second teacher was asked")
    row("delivered to the students", findings.checked)
    verdict("lost", findings.lost)
    verdict("repeated", findings.repeated)
    verdict("out of order", findings.out_of_order)
    wrong = findings.mislabelled + findings.changed
    difference = findings.largest_difference
    equal = f"equal within {difference:.0e}" if difference else "exactly equal"
    verdict("with another's label", wrong, f"all computed again here: {equal}")
    return table


def _teachers(result: DemoResult) -> Table:
    table = _table("Who served how many", "teacher", "rows", "share", "requests", "failed", "what became of it")
    table.columns[-1].justify = "left"
    events: dict[str, TeacherEvent] = {event.teacher: event for event in result.events}
    whole = max(1, sum(teacher.rows for teacher in result.stats.teachers.values()))
    for name, teacher in sorted(result.stats.teachers.items()):
        fate = _fate(events.get(name), result.exit_codes.get(name))
        cells = (f"{teacher.rows:,}", f"{teacher.rows / whole:.0%}", f"{teacher.requests:,}", f"{teacher.failures:,}")
        table.add_row(name, *cells, Text(*fate))
    return table


def _fate(event: TeacherEvent | None, exit_code: int | None) -> tuple[str, str]:
    if event is None:
        return "served to the end", ""
    when = f"at {event.at_s:.1f} s"
    if event.kind == "join":
        return f"joined {when}", "green"
    ended = "still ran 10 s later" if exit_code is None else f"exit code {exit_code}"
    if event.kind == "kill":
        return f"SIGKILL {when}", "red"
    return f"SIGTERM {when}, then {ended}", "yellow"
