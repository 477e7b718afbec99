"""The demo from start to end: its teachers, an epoch of its students, the events, and the output."""

from __future__ import annotations

import contextlib
import json
import logging
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text
from safetensors.torch import save_file

from edl.cli.demo.models import (
    Delivered,
    DemoPlan,
    Digits,
    Findings,
    ModelPair,
    Teacher,
    accuracy,
    batches,
    check,
    load,
    size,
    student,
    train_teacher,
)
from edl.cli.output import open_progress, table
from edl.discovery import open_store
from edl.distill import Credentials, DistillReader, Options, ReaderStats
from edl.errors import EDLError, SettingsError
from edl.master.scaling.advisor import ScalingAdvisor
from edl.testing import LocalTeacher

_SERVICE: Final = "digits"
_START_S: Final = 120.0
"""Time allowed for a teacher to become ready: several teachers import torch at once, on few cores."""
_STOP_S: Final = 10.0
"""Time allowed for a teacher to drain: it has only tens of milliseconds of work left."""
_BIN_S: Final = 0.5

_Kind = Literal["kill", "join", "drain"]
_STYLES: Final = {"kill": "bold red", "join": "bold green", "drain": "bold yellow"}
_COLOURS: Final = ("#4c78a8", "#72b7b2", "#eeca3b", "#b279a2", "#9d755d", "#83bcb6")
_EVENTS: Final = {
    "kill": ("#d62728", "killed (SIGKILL)"),
    "join": ("#2ca02c", "joins"),
    "drain": ("#e08214", "drains (SIGTERM)"),
}


# --- Printing ---

_Bar: TypeAlias = Callable[[int, str], None]
"""Shows how much of a step is done, and a text."""


class Screen:
    """Prints the demo's output to a rich console."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
        self._step = 0

    def step(self, text: str) -> None:
        """Print the headline of the next step."""
        self._step += 1
        self.console.print(Text(f"{self._step}. {text}", "bold"))

    def say(self, text: str, style: str = "") -> None:
        """Print a line about the current step."""
        self.console.print(Text(f"   {text}", style))

    @contextmanager
    def log_of(self, logger: str) -> Iterator[None]:
        """Show the library's log lines."""
        handler, log = logging.Handler(), logging.getLogger(logger)
        handler.emit = lambda record: self.say(f"{record.name}: {record.getMessage()}", "dim")  # type: ignore[method-assign]
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)

    @contextmanager
    def bar(self, total: int) -> Iterator[_Bar]:
        """Show progress towards `total`; `say` prints above it."""
        columns = (TextColumn("  "), BarColumn(bar_width=28), TaskProgressColumn(), TextColumn("{task.description}"))

        def write_line(done: int, _: int | None, text: str) -> None:
            self.say(f"{done / total:4.0%}  {text}")

        with open_progress(self.console, columns, write_line) as show:
            yield lambda done, text: show(done, total, text)


# --- Teachers ---


class _Fleet:
    """The teachers, by name. A context manager that stops the teachers still running, and keeps their logs."""

    def __init__(self, plan: DemoPlan, checkpoint: Path, discovery: str) -> None:
        self._plan = plan
        self._checkpoint = checkpoint
        self._discovery = discovery
        self.teachers: dict[str, LocalTeacher] = {}

    def start(self, name: str) -> None:
        serve = {
            "torch-factory": "edl.cli.demo.models:teacher",
            "checkpoint": self._checkpoint,
            "option": {"pause_ms": self._plan.pause_ms},
            "input": "image:float32[1,8,8]",
            "output": "logits:float32[10]",
            "device": "cpu",
            "threads": 1,
            "linger": "2s",  # this machine is busy, so students may notice a drain late
            "id": name,
        }
        self.teachers[name] = LocalTeacher(
            "",
            name="digits",
            service=_SERVICE,
            discovery=self._discovery,
            serve=serve,
            env={"OMP_NUM_THREADS": "1"},
            wait=False,
        )

    def exit_code(self, name: str) -> int | None:
        """Wait briefly for a teacher to end; return its exit code, or None if it still runs."""
        with contextlib.suppress(TimeoutError):
            return self.teachers[name].wait(_STOP_S)
        return None

    def __enter__(self) -> _Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                for teacher in self.teachers.values():
                    teacher.terminate()
                for name in self.teachers:
                    self.exit_code(name)
        finally:
            for name, teacher in self.teachers.items():
                self._plan.out.joinpath(f"{name}.log").write_text(teacher.log)
                teacher.close()


@contextmanager
def _page(discovery: str, screen: Screen) -> Iterator[None]:
    from edl.dashboard.server import DashboardServer, DashboardSettings

    with contextlib.ExitStack() as stack:
        store = stack.enter_context(open_store(discovery))
        stack.enter_context(ScalingAdvisor(store))  # advises on the number of teachers, and starts none
        server = stack.enter_context(DashboardServer(DashboardSettings(store=discovery, port=0)))
        screen.step(f"The dashboard runs until the demo ends: {server.url}")
        yield


# --- An epoch ---


@dataclass(frozen=True)
class TeacherEvent:
    """At `at_s` seconds of the epoch, `kind` happened to `teacher`."""

    at_s: float
    kind: _Kind
    teacher: str


class _Epoch:
    """Records an epoch's counters, and kills, starts and drains teachers at the plan's fractions of it."""

    def __init__(self, plan: DemoPlan, reader: DistillReader, fleet: _Fleet, screen: Screen) -> None:
        self._reader = reader
        self._plan = plan
        self._fleet = fleet
        self._screen = screen
        self._newcomer = f"teacher-{plan.teachers + 1}"
        self._done: set[str] = set()
        self._began = time.monotonic()
        self.samples = [(0.0, reader.stats())]
        self.events: list[TeacherEvent] = []

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._began

    def after(self, batches: int) -> ReaderStats:
        """Record the counters after `batches` batches, and kill, start or drain a teacher if that is due."""
        self.samples.append((self.now_s, self._reader.stats()))
        stats = self.samples[-1][1]
        plan, teachers, fraction = self._plan, self._fleet.teachers, batches / self._plan.batches
        if fraction >= plan.kill_at and self._is_first("kill"):
            self._tell("kill", "teacher-1", "gets SIGKILL in the middle of its work")
            teachers["teacher-1"].kill()
        if fraction >= plan.join_at and self._is_first("start"):
            self._fleet.start(self._newcomer)
        if "start" in self._done and "join" not in self._done:
            if fraction >= plan.drain_at:  # a very slow machine: let it join before the next one leaves
                teachers[self._newcomer].wait_ready(_START_S)
            seen = stats.teachers.get(self._newcomer)
            if seen is not None and seen.state == "ready" and self._is_first("join"):
                self._tell("join", self._newcomer, "has started and is found: it serves from now on")
        if fraction >= plan.drain_at and self._is_first("drain"):
            self._tell("drain", "teacher-2", "gets SIGTERM: it finishes its requests and leaves")
            teachers["teacher-2"].terminate()
        return stats

    def _tell(self, kind: _Kind, teacher: str, words: str) -> None:
        self._screen.say(f"{kind.upper():<5} {teacher} {words}", _STYLES[kind])
        self.events.append(TeacherEvent(self.now_s, kind, teacher))

    def _is_first(self, what: str) -> bool:
        first = what not in self._done
        self._done.add(what)
        return first


def _train_students(
    plan: DemoPlan, digits: Digits, discovery: str, fleet: _Fleet, screen: Screen
) -> tuple[list[ModelPair], list[Delivered], _Epoch]:
    """Train every seed's two students on an epoch from `DistillReader`. Only this part is a typical student program."""
    pairs = [ModelPair(seed, plan.steps, plan.temperature) for seed in range(plan.seeds)]
    delivered: list[Delivered] = []
    options = Options(credentials=Credentials())  # the demo's teachers need none, whatever the environment says
    reader = DistillReader(ins=["image", None, None], predicts=["logits"], options=options)
    reader.set_dynamic_teacher(discovery, _SERVICE)
    reader.set_batch_generator(lambda: batches(digits, plan))
    with reader, screen.bar(plan.batches) as bar, screen.log_of("edl"):
        epoch = _Epoch(plan, reader, fleet, screen)
        losses: deque[tuple[float, float]] = deque(maxlen=50)
        for batch, (image, label, number, logits) in enumerate(reader()):
            pair = pairs[plan.seed_of(batch)]
            losses.append(pair.step(*(torch.from_numpy(part) for part in (image, label, logits))))
            delivered.append((image, label, number, logits))
            stats = epoch.after(batch + 1)
            if batch % 10 == 0:
                rate = stats.rows_delivered / max(epoch.now_s, 1e-3)
                hard, soft = (statistics.fmean(column) for column in zip(*losses, strict=True))
                words = f"training loss: alone {hard:.2f}, distilled {soft:.2f} (not comparable)"
                bar(batch, f"{rate:,.0f} rows/s  {stats.teachers_live} teachers  {words}")
        return pairs, delivered, epoch


# --- Results ---


def _draw_picture(epoch: _Epoch, path: Path, what: str) -> None:
    """Plot rows per second by teacher, stacked, in bins of half a second. The title starts with `what`."""
    from matplotlib.figure import Figure

    times = [at for at, _ in epoch.samples]
    edges = np.arange(0.0, times[-1], _BIN_S)  # without the last bin, which is not full
    names = dict.fromkeys(name for _, stats in epoch.samples for name in stats.teachers)

    def rate(count: Callable[[ReaderStats], int]) -> np.ndarray[Any, Any]:
        rates: np.ndarray[Any, Any] = np.diff(np.interp(edges, times, [count(stats) for _, stats in epoch.samples]))
        return rates / _BIN_S

    def rows_of(name: str) -> Callable[[ReaderStats], int]:
        return lambda stats: stats.teachers[name].rows if name in stats.teachers else 0

    served = [rate(rows_of(name)) for name in names]
    middles = edges[:-1] + _BIN_S / 2
    figure = Figure(figsize=(10, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    colours = [_COLOURS[index % len(_COLOURS)] for index in range(len(names))]
    axes.stackplot(middles, *served, labels=list(names), colors=colours, alpha=0.85)
    delivered = rate(lambda stats: stats.rows_delivered)
    axes.plot(middles, delivered, color="#222222", linewidth=1.6, label="delivered to the training loop")
    top = 1.32 * max(1.0, float(np.max(sum(served, np.zeros_like(middles)))))
    for row, event in enumerate(epoch.events):
        colour, words = _EVENTS[event.kind]
        axes.axvline(event.at_s, color=colour, linewidth=1.6, linestyle="--")
        axes.annotate(
            f"{event.teacher} {words}",
            (event.at_s, top),
            xytext=(5, -6 - 15 * row),
            textcoords="offset points",
            verticalalignment="top",
            color=colour,
            fontsize=9,
            fontweight="bold",
            bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.5},  # over other events' lines
        )
    axes.set(xlim=(0, times[-1]), ylim=(0, top), xlabel="seconds of the epoch", ylabel="soft labels per second")
    axes.set_title(f"{what}, each labelled once and in order, while teachers come and go", loc="left", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    figure.legend(loc="outside lower center", fontsize=9, frameon=False, ncols=len(names) + 1)
    figure.savefig(path)


@dataclass(frozen=True)
class DemoResult:
    """The demo's figures. Accuracies are shares of the held-out images; the students' accuracies are listed by seed.

    The exit code of a killed or drained teacher is None if the teacher was still running long afterwards.
    """

    plan: DemoPlan
    teacher: float
    alone: tuple[float, ...]
    distilled: tuple[float, ...]
    stats: ReaderStats
    events: tuple[TeacherEvent, ...]
    exit_codes: dict[str, int | None]
    findings: Findings
    took_s: float


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str | Text]], left: str = "") -> Table:
    found = table(headings, rows, [heading for heading in headings[1:] if heading != left])
    found.title, found.title_justify, found.title_style = title, "left", "bold"
    return found


def _accuracies(result: DemoResult, digits: Digits) -> Table:
    def row(name: str, parameters: int, learned: str, values: Sequence[float], style: str = "") -> list[str | Text]:
        mean, bounds = f"{statistics.fmean(values):.1%}", ""
        if len(values) > 1:
            mean += f" ±{100 * statistics.stdev(values):.1f}"
            bounds = f"{min(values):.1%} to {max(values):.1%}"
        return [Text(cell, style) for cell in (name, f"{parameters:,}", learned, mean, bounds)]

    small = size(student())
    rows = [
        row("teacher", size(Teacher()), f"{len(digits.images):,} images, labels", [result.teacher]),
        row("student alone", small, f"{result.plan.labelled} images, labels", result.alone),
        row("student distilled", small, "the same images, soft labels", result.distilled, "bold green"),
    ]
    title = f"Accuracy on {len(digits.test_images)} images that no model has seen"
    return _table(title, ("", "parameters", "learned from", "mean", "lowest to highest"), rows)


def _comparison(result: DemoResult) -> Text:
    plan = result.plan
    gains = [soft - hard for soft, hard in zip(result.distilled, result.alone, strict=True)]
    return Text(
        f"{plan.seeds} seeds. Both students of a seed start with the same weights and take {plan.steps} steps\n"
        "on the same distorted images; only the labels differ. Distilled beats alone by\n"
        f"{100 * statistics.fmean(gains):.1f} points ({100 * min(gains):+.1f} to {100 * max(gains):+.1f})."
    )


def _samples(result: DemoResult) -> Table:
    stats, findings = result.stats, result.findings

    def verdict(name: str, wrong: int, note: str = "") -> tuple[str, str, Text]:
        sign, style = ("✗", "bold red") if wrong else ("✓", "green")
        return name, f"{wrong:,}", Text(f"{sign} {note}", style)

    difference = findings.largest_difference
    equal = f"equal within {difference:.0e}" if difference else "exactly equal"
    wrong = findings.mislabelled + findings.changed
    rows: list[Sequence[str | Text]] = [
        ("requested from teachers", f"{stats.rows_asked:,}", ""),
        ("received", f"{stats.rows_received:,}", ""),
        ("resent", f"{stats.rows_resent:,}", "their teacher went away"),
        ("hedged", f"{stats.rows_hedged:,}", "late, so a second teacher was asked"),
        ("delivered to the students", f"{findings.checked:,}", ""),
        verdict("lost", findings.lost),
        verdict("repeated", findings.repeated),
        verdict("out of order", findings.out_of_order),
        verdict("with another's label", wrong, f"all recomputed here: {equal}"),
    ]
    return _table(f"Samples, in {result.took_s:.0f} s", ("", "rows", " "), rows, left=" ")


def _teachers(result: DemoResult) -> Table:
    events = {event.teacher: event for event in result.events}
    whole = max(1, sum(teacher.rows for teacher in result.stats.teachers.values()))
    rows = []
    for name, teacher in sorted(result.stats.teachers.items()):
        counts = f"{teacher.rows:,}", f"{teacher.rows / whole:.0%}", f"{teacher.requests:,}", f"{teacher.failures:,}"
        rows.append((name, *counts, Text(*_fate(events.get(name), result.exit_codes.get(name)))))
    headings = ("teacher", "rows", "share", "requests", "failed", "outcome")
    return _table("Rows by teacher", headings, rows, left=headings[-1])


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


# --- The whole demo ---

_MOTIONS = "rotated, scaled, shifted, with noise"


def tell(plan: DemoPlan, screen: Screen) -> None:
    """Run the demo and show its results; EDLError if a sample was lost, repeated, reordered, changed or mislabelled."""
    torch.set_num_threads(1)  # the teachers need the other cores
    try:
        plan.out.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise SettingsError(f"--out {str(plan.out)!r}: {exc.strerror or exc}") from exc
    digits = load()

    screen.step(f"A teacher learns from {len(digits.images):,} labelled images of handwritten digits.")
    teacher = _train_teacher(plan, digits, screen)
    teacher_accuracy = accuracy(teacher, digits.test_images, digits.test_labels)
    screen.say(f"{size(teacher):,} parameters, accuracy {teacher_accuracy:.1%} on {len(digits.test_images)} new images")

    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="edl-demo-"))
        checkpoint = Path(scratch, "teacher.safetensors")
        save_file(teacher.state_dict(), checkpoint)
        discovery = f"sqlite:///{scratch}/discovery.sqlite"
        if plan.dashboard:
            stack.enter_context(_page(discovery, screen))

        screen.step(f"{plan.teachers} processes serve it: `edl serve`, found through a SQLite file.")
        with _Fleet(plan, checkpoint, discovery) as fleet:
            names = [f"teacher-{number}" for number in range(1, plan.teachers + 1)]
            for name in names:
                fleet.start(name)
            for name in names:
                fleet.teachers[name].wait_ready(_START_S)

            screen.step(f"Students learn from {plan.total_rows:,} distorted images, with the teachers' soft labels.")
            screen.say(
                f"{plan.seeds} seeds, {plan.labelled} images each ({_MOTIONS}), {plan.steps} steps of {plan.rows}"
            )
            pairs, delivered, epoch = _train_students(plan, digits, discovery, fleet, screen)
            ended = [event.teacher for event in epoch.events if event.kind != "join"]
            exit_codes = {name: fleet.exit_code(name) for name in ended}

        screen.step("Every sample is checked, and every label compared with the teacher's.")
        findings = check(plan, delivered, digits, teacher)
        alone, distilled = (
            tuple(accuracy(model, digits.test_images, digits.test_labels) for model in models)
            for models in zip(*((pair.alone, pair.distilled) for pair in pairs), strict=True)
        )
        result = DemoResult(
            plan=plan,
            teacher=teacher_accuracy,
            alone=alone,
            distilled=distilled,
            stats=epoch.samples[-1][1],
            events=tuple(epoch.events),
            exit_codes=exit_codes,
            findings=findings,
            took_s=epoch.samples[-1][0],
        )
        _draw_picture(epoch, plan.out / "demo.png", f"{plan.total_rows:,} samples for {plan.seeds} students")
        fields = {**asdict(result), "all_well": findings.all_well}
        plan.out.joinpath("demo.json").write_text(json.dumps(fields, indent=1, default=str) + "\n")
        screen.console.print(
            "", _accuracies(result, digits), _comparison(result), "", _samples(result), _teachers(result)
        )
        screen.console.print(f"In {plan.out}: the plot (demo.png), the figures (demo.json) and the teachers' logs.")
        if not findings.all_well:
            raise EDLError(f"samples or labels were not delivered exactly once, correctly and in order: {findings}")


def _train_teacher(plan: DemoPlan, digits: Digits, screen: Screen) -> Teacher:
    with screen.bar(plan.teacher_epochs) as bar:

        def show(done: int, loss: float) -> None:
            bar(done, f"epoch {done}, loss {loss:.3f}")

        return train_teacher(digits, plan.teacher_epochs, show)
