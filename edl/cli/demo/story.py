"""The demo from beginning to end."""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from edl.cli.demo import data, epoch, models, picture, report
from edl.cli.demo.check import check
from edl.cli.demo.fleet import Fleet
from edl.cli.demo.page import show_page
from edl.cli.demo.plan import DemoPlan
from edl.cli.demo.report import DemoResult
from edl.cli.demo.screen import Screen
from edl.errors import EDLError, SettingsError

__all__ = ["tell"]

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
    digits = data.load()

    screen.step(f"A teacher learns from {len(digits.images):,} labelled images of handwritten digits.")
    teacher = _train_teacher(plan, digits, screen)
    teacher_accuracy = models.accuracy(teacher, digits.test_images, digits.test_labels)
    screen.say(
        f"{models.size(teacher):,} parameters, right on {teacher_accuracy:.1%} of {len(digits.test_images)} others"
    )

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
            outcome = epoch.train(plan, digits, discovery, fleet, screen)
            ended = [event.teacher for event in outcome.timeline.events if event.kind != "join"]
            exit_codes = {name: fleet.exit_code(name) for name in ended}

        screen.step("Every sample is looked at again, and every label compared with the teacher's.")
        findings = check(outcome.delivered, digits, teacher)
        result = DemoResult.of(
            plan, digits, teacher, teacher_accuracy, outcome, findings, exit_codes, time.monotonic() - began
        )
        figure = plan.out / "demo.png"
        picture.draw(outcome.timeline, figure, f"{plan.total_rows:,} samples for {plan.seeds} students")
        result.write(plan.out / "demo.json")
        report.show(result, screen.console)
        picture.show(outcome.timeline, screen.console)
        screen.console.print(f"Picture: {figure}, figures: {plan.out / 'demo.json'}, teachers' logs beside them.")
        if not findings.all_well:
            raise EDLError(f"the promise was broken: {findings}")
        return result


def _train_teacher(plan: DemoPlan, digits: data.Digits, screen: Screen) -> models.Teacher:
    with screen.bar(plan.teacher_epochs) as bar:

        def show(done: int, loss: float) -> None:
            bar.update(done, f"epoch {done}, loss {loss:.3f}")

        return models.train_teacher(digits, plan.teacher_epochs, show)
