"""The demo from beginning to end: its teachers, an epoch of its students, and what happens to both meanwhile."""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
import webbrowser
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from safetensors.torch import save_file

from edl.cli.demo.models import (
    Delivered,
    DemoPlan,
    Digits,
    ModelPair,
    Teacher,
    accuracy,
    batches,
    check,
    load,
    size,
    train_teacher,
)
from edl.cli.demo.report import Bar, DemoResult, Screen, Timeline, draw_picture, show_picture, show_result
from edl.discovery import open_store
from edl.distill import Credentials, DistillReader, Options, ReaderStats
from edl.errors import EDLError, SettingsError
from edl.master.scaling.advisor import ScalingAdvisor
from edl.testing import LocalTeacher

SERVICE = "digits"

_START_S = 120.0
"""How long a teacher may take to be ready: it imports torch beside others that do, on few cores."""
_STOP_S = 10.0
"""How long a teacher may take to drain: a batch takes it some ten milliseconds."""


class Fleet:
    """Starts and ends teachers by name. A context manager: it ends what still runs."""

    def __init__(self, folder: Path, checkpoint: Path, discovery: str, pause_ms: float) -> None:
        self._folder = folder
        self._checkpoint = checkpoint
        self._discovery = discovery
        self._pause_ms = pause_ms
        self._teachers: dict[str, LocalTeacher] = {}

    def start(self, name: str) -> None:
        """Start a teacher, without waiting until it serves."""
        serve = {
            "torch-factory": "edl.cli.demo.models:teacher",
            "checkpoint": self._checkpoint,
            "option": {"pause_ms": self._pause_ms},
            "input": "image:float32[1,8,8]",
            "output": "logits:float32[10]",
            "device": "cpu",
            "threads": 1,
            "linger": "2s",  # this machine is busy, and students may hear of a drain late
            "id": name,
        }
        self._teachers[name] = LocalTeacher(
            "",
            name="digits",
            service=SERVICE,
            discovery=self._discovery,
            serve=serve,
            env={"OMP_NUM_THREADS": "1"},
            wait=False,
        )

    def wait_ready(self, name: str) -> None:
        """Wait until the teacher serves.

        Raises:
            EDLError: it ended, or it takes too long.
        """
        self._teachers[name].wait_ready(_START_S)

    def kill(self, name: str) -> None:
        """Send SIGKILL: the teacher is gone at once, in the middle of its work."""
        self._teachers[name].kill()

    def drain(self, name: str) -> None:
        """SIGTERM: the teacher leaves discovery, finishes what it has, and exits."""
        self._teachers[name].terminate()

    def exit_code(self, name: str) -> int | None:
        """How the teacher ended, waiting a little for it; None while it runs."""
        with contextlib.suppress(TimeoutError):
            return self._teachers[name].wait(_STOP_S)
        return None

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if exc is None:
                self._drain_all()
        finally:
            for name, teacher in self._teachers.items():
                self._folder.joinpath(f"{name}.log").write_text(teacher.log)
                teacher.close()

    def _drain_all(self) -> None:
        for teacher in self._teachers.values():
            teacher.terminate()
        for name in self._teachers:
            self.exit_code(name)


@contextlib.contextmanager
def show_page(discovery: str, screen: Screen) -> Iterator[None]:
    """Serve the page, say where, and have a browser open it if this is a person's terminal."""
    from edl.dashboard.server import DashboardServer, DashboardSettings

    with contextlib.ExitStack() as stack:
        store = stack.enter_context(open_store(discovery))
        stack.enter_context(ScalingAdvisor(store))  # it says how many teachers would do, and starts none
        server = stack.enter_context(DashboardServer(DashboardSettings(store=discovery, port=0)))
        screen.step(f"A page shows it all until the demo ends: {server.url}")
        if sys.stdout.isatty() and _is_window():
            webbrowser.open(server.url)
        yield


def _is_window() -> bool:
    """Whether the browser opens a window: one for terminals would take the demo's."""
    try:
        return type(webbrowser.get()) is not webbrowser.GenericBrowser
    except webbrowser.Error:
        return False


# --- An epoch ---


@dataclass(frozen=True)
class EpochOutcome:
    """What the epoch left behind; `took_s` lasts from the first request for a batch to the last batch learned."""

    pairs: list[ModelPair]
    delivered: Delivered
    timeline: Timeline
    stats: ReaderStats
    took_s: float


def train_students(plan: DemoPlan, digits: Digits, discovery: str, fleet: Fleet, screen: Screen) -> EpochOutcome:
    """Train every seed's two students on the batches of an epoch of `DistillReader`; the seeds take turns.

    This is what a student's program looks like; the rest is about what the demo does to its teachers.
    """
    pairs = [ModelPair(seed, plan.steps, plan.temperature) for seed in range(plan.seeds)]
    delivered = Delivered(plan)
    options = Options(credentials=Credentials())  # the demo's teachers have none, whatever the environment says
    reader = DistillReader(ins=["image", None, None], predicts=["logits"], options=options)
    reader.set_dynamic_teacher(discovery, SERVICE)
    reader.set_batch_generator(lambda: batches(digits, plan))
    with reader, screen.bar(plan.batches) as bar, screen.words_of("edl"):
        with Timeline(reader.stats) as timeline:
            troubles = _Troubles(plan, reader, fleet, timeline, screen)
            losses: deque[tuple[float, float]] = deque(maxlen=50)
            for batch, (image, label, number, logits) in enumerate(reader()):
                pair = pairs[plan.seed_of(batch)]
                losses.append(pair.step(*(torch.from_numpy(part) for part in (image, label, logits))))
                delivered.add(image, label, number, logits)
                troubles.at((batch + 1) / plan.batches)
                if batch % 10 == 0:
                    _show_progress(bar, batch, plan, reader.stats(), timeline, losses)
            took_s = timeline.now_s
        return EpochOutcome(pairs, delivered, timeline, reader.stats(), took_s)


def _show_progress(
    bar: Bar, batch: int, plan: DemoPlan, stats: ReaderStats, timeline: Timeline, losses: deque[tuple[float, float]]
) -> None:
    rate = stats.rows_delivered / max(timeline.now_s, 1e-3)
    hard, soft = (statistics.fmean(column) for column in zip(*losses, strict=True))
    losses_now = f"training loss: alone {hard:.2f}, distilled {soft:.2f} (not comparable)"
    text = f"{rate:,.0f} rows/s  {stats.teachers_live} teachers  {losses_now}"
    bar(batch, text)


class _Troubles:
    """Kills, starts and drains teachers as the epoch reaches the fractions that the plan names."""

    def __init__(self, plan: DemoPlan, reader: DistillReader, fleet: Fleet, timeline: Timeline, screen: Screen) -> None:
        self._reader = reader
        self._plan = plan
        self._fleet = fleet
        self._timeline = timeline
        self._screen = screen
        self._killed = "teacher-1"
        self._newcomer = f"teacher-{plan.teachers + 1}"
        self._drained = "teacher-2"
        self._done: set[str] = set()

    def at(self, fraction: float) -> None:
        """Note that the epoch is at `fraction`."""
        if fraction >= self._plan.kill_at and self._once("kill"):
            self._screen.event("kill", f"{self._killed} gets SIGKILL in the middle of its work")
            self._timeline.mark("kill", self._killed)
            self._fleet.kill(self._killed)
        if fraction >= self._plan.join_at and self._once("start"):
            self._fleet.start(self._newcomer)
        if "start" in self._done and "join" not in self._done:
            if fraction >= self._plan.drain_at:
                self._fleet.wait_ready(self._newcomer)  # a very slow machine: let it come before the next one goes
            seen = self._reader.stats().teachers.get(self._newcomer)
            if seen is not None and seen.state == "ready" and self._once("join"):
                self._timeline.mark("join", self._newcomer)
                self._screen.event("join", f"{self._newcomer} has started and is found: it serves from now on")
        if fraction >= self._plan.drain_at and self._once("drain"):
            self._screen.event("drain", f"{self._drained} gets SIGTERM: it finishes what it has, and leaves")
            self._timeline.mark("drain", self._drained)
            self._fleet.drain(self._drained)

    def _once(self, what: str) -> bool:
        first = what not in self._done
        self._done.add(what)
        return first


# --- All of it ---

_MOTIONS = "turned, scaled, moved, with noise"


def tell(plan: DemoPlan, screen: Screen) -> DemoResult:
    """Run the demo and show how it ends.

    Raises:
        EDLError: a sample was lost, repeated, out of order, changed, or given another sample's label.
    """
    began = time.monotonic()
    torch.set_num_threads(1)  # the teachers want the other cores
    try:
        plan.out.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise SettingsError(f"--out {str(plan.out)!r}: {exc.strerror or exc}") from exc
    digits = load()

    screen.step(f"A teacher learns from {len(digits.images):,} labelled images of handwritten digits.")
    teacher = _train_teacher(plan, digits, screen)
    teacher_accuracy = accuracy(teacher, digits.test_images, digits.test_labels)
    screen.say(f"{size(teacher):,} parameters, right on {teacher_accuracy:.1%} of {len(digits.test_images)} others")

    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="edl-demo-"))
        checkpoint = Path(scratch, "teacher.safetensors")
        save_file(teacher.state_dict(), checkpoint)
        discovery = f"sqlite:///{scratch}/discovery.sqlite"
        if plan.dashboard:
            stack.enter_context(show_page(discovery, screen))

        screen.step(f"{plan.teachers} processes serve it: `edl serve`, found through a SQLite file.")
        with Fleet(plan.out, checkpoint, discovery, plan.pause_ms) as fleet:
            names = [f"teacher-{number}" for number in range(1, plan.teachers + 1)]
            for name in names:
                fleet.start(name)
            for name in names:
                fleet.wait_ready(name)

            screen.step(f"Students learn from {plan.total_rows:,} distorted images, with soft labels as they come.")
            screen.say(
                f"{plan.seeds} seeds, {plan.labelled} images each ({_MOTIONS}), {plan.steps} steps of {plan.rows}"
            )
            outcome = train_students(plan, digits, discovery, fleet, screen)
            ended = [event.teacher for event in outcome.timeline.events if event.kind != "join"]
            exit_codes = {name: fleet.exit_code(name) for name in ended}

        screen.step("Every sample is looked at again, and every label compared with the teacher's.")
        findings = check(outcome.delivered, digits, teacher)
        alone, distilled = (
            tuple(accuracy(model, digits.test_images, digits.test_labels) for model in models)
            for models in zip(*((pair.alone, pair.distilled) for pair in outcome.pairs), strict=True)
        )
        result = DemoResult(
            plan=plan,
            teacher_parameters=size(teacher),
            student_parameters=size(outcome.pairs[0].alone),
            teacher_images=len(digits.images),
            test_images=len(digits.test_images),
            teacher=teacher_accuracy,
            alone=alone,
            distilled=distilled,
            stats=outcome.stats,
            events=tuple(outcome.timeline.events),
            exit_codes=exit_codes,
            findings=findings,
            took_s=outcome.took_s,
            whole_s=time.monotonic() - began,
        )
        figure = plan.out / "demo.png"
        draw_picture(outcome.timeline, figure, f"{plan.total_rows:,} samples for {plan.seeds} students")
        result.write(plan.out / "demo.json")
        show_result(result, screen.console)
        show_picture(outcome.timeline, screen.console)
        screen.console.print(f"Picture: {figure}, figures: {plan.out / 'demo.json'}, teachers' logs beside them.")
        if not findings.all_well:
            raise EDLError(f"the promise was broken: {findings}")
        return result


def _train_teacher(plan: DemoPlan, digits: Digits, screen: Screen) -> Teacher:
    with screen.bar(plan.teacher_epochs) as bar:

        def show(done: int, loss: float) -> None:
            bar(done, f"epoch {done}, loss {loss:.3f}")

        return train_teacher(digits, plan.teacher_epochs, show)
