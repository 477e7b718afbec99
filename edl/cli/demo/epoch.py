"""An epoch of all students, while a teacher is killed, another joins, and a third is drained."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

import torch

from edl.cli.demo.check import Delivered
from edl.cli.demo.data import Digits, batches
from edl.cli.demo.fleet import SERVICE, Fleet
from edl.cli.demo.models import ModelPair
from edl.cli.demo.plan import DemoPlan
from edl.cli.demo.screen import Bar, Screen
from edl.cli.demo.timeline import Timeline
from edl.distill import Credentials, DistillReader, Options, ReaderStats

__all__ = ["EpochOutcome", "train"]


@dataclass(frozen=True)
class EpochOutcome:
    """What the epoch left behind.

    Attributes:
        took_s: seconds from the first request for a batch to the last batch learned.
    """

    pairs: list[ModelPair]
    delivered: Delivered
    timeline: Timeline
    stats: ReaderStats
    took_s: float


def train(plan: DemoPlan, digits: Digits, discovery: str, fleet: Fleet, screen: Screen) -> EpochOutcome:
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
                    _show(bar, batch, plan, reader.stats(), timeline, losses)
            took_s = timeline.now_s
        return EpochOutcome(pairs, delivered, timeline, reader.stats(), took_s)


def _show(
    bar: Bar, batch: int, plan: DemoPlan, stats: ReaderStats, timeline: Timeline, losses: deque[tuple[float, float]]
) -> None:
    rate = stats.rows_delivered / max(timeline.now_s, 1e-3)
    hard, soft = (statistics.fmean(column) for column in zip(*losses, strict=True))
    losses_now = f"training loss: alone {hard:.2f}, distilled {soft:.2f} (not comparable)"
    text = f"{rate:,.0f} rows/s  {stats.teachers_live} teachers  {losses_now}"
    bar.update(batch, text)


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
