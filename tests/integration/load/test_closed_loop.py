"""Real teachers, a real student and the advisor: as many teachers as the formula says, and no more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edl.discovery import open_store
from edl.distill import DistillReader
from edl.load_reporting import ServiceLoad, read_service, read_wanted
from edl.master.scaling.advisor import AdvisorSettings, ScalingAdvisor
from edl.master.scaling.teacher_demand import TeacherScalingSettings, observe_teachers, required_teachers
from edl.testing import LocalTeacher

ROWS = 8  # of a batch
ROW_S = 0.005  # a teacher computes 200 rows/s
STEP_S = 0.0143  # the student asks for 560 rows/s: 3.5 teachers at 80%
NEEDED = 4
INTERVAL_S, WINDOW_S = 0.2, 1.5
SCALING = TeacherScalingSettings(up_s=1.5, down_s=3.0, rates_s=2.5, judge_s=4.0)


class Operator:
    """Starts and ends teachers as it is wanted, as an operator of a cluster does."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.teachers: list[LocalTeacher] = []
        self.draining: list[LocalTeacher] = []
        self.most = 0

    def follow(self, wanted: int) -> None:
        while len(self.teachers) < wanted:
            options = {"max_batch": ROWS, "row_s": ROW_S, "width": 4}
            self.teachers.append(LocalTeacher("echo", service="s", discovery=self._url, wait=False, **options))
        for teacher in self.teachers[wanted:]:
            teacher.terminate()
            self.draining.append(teacher)
        self.teachers = self.teachers[:wanted]
        self.most = max(self.most, wanted)


class Student:
    """Trains in a thread: takes a batch, and computes for a while; may be paused."""

    def __init__(self, url: str) -> None:
        self.reader = DistillReader(["x"], ["y"])
        self.reader.set_dynamic_teacher(url, "s")
        self.reader.set_batch_generator(self._batches)
        self.running = threading.Event()
        self.running.set()
        self.steps = 0
        self._ended = False
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def _batches(self) -> Iterator[tuple[np.ndarray]]:
        while True:
            yield (np.ones((ROWS, 4), np.float32),)

    def _train(self) -> None:
        for _ in self.reader():
            time.sleep(STEP_S)
            self.steps += 1
            self.running.wait()
            if self._ended:
                return

    def close(self) -> None:
        self._ended = True
        self.running.set()
        self._thread.join(60)
        self.reader.close()


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("EDL_LOAD_INTERVAL_S", str(INTERVAL_S))
    monkeypatch.setenv("EDL_LOAD_WINDOW_S", str(WINDOW_S))
    return f"sqlite:///{tmp_path}/discovery.sqlite"


@pytest.fixture
def operator(url: str) -> Iterator[Operator]:
    operator = Operator(url)
    yield operator
    for teacher in operator.teachers + operator.draining:
        teacher.close()


@pytest.mark.slow
def test_teachers_follow_the_formula(url: str, operator: Operator) -> None:
    operator.follow(1)
    operator.teachers[0].wait_ready()
    with open_store(url) as store:
        student = Student(url)

        def wanted() -> int:
            found = read_wanted(store, "teachers", "s")
            return int(found["count"]) if found is not None else len(operator.teachers)

        def until(holds: Callable[[ServiceLoad], bool], within_s: float) -> ServiceLoad:
            deadline = time.monotonic() + within_s
            while True:
                operator.follow(wanted())
                load = read_service(store, "s")
                if holds(load):
                    return load
                assert time.monotonic() < deadline, (
                    f"not within {within_s} s: {load}, {read_wanted(store, 'teachers', 's')}"
                )
                time.sleep(0.1)

        def is_settled(load: ServiceLoad) -> bool:
            there = load.live == wanted() == required_teachers(observe_teachers(load, 0.0))
            return there and load.wait_share is not None and load.wait_share < 0.05

        try:
            alone = until(lambda load: bool(load.students) and (load.wait_share or 0) > 0.3, 30)
            assert alone.live == 1
            with ScalingAdvisor(store, AdvisorSettings(SCALING, interval_s=0.2, refresh_s=0.5, ttl_s=2.0)):
                until(is_settled, 60)
                assert operator.most <= NEEDED, "never more than the formula says"
                student.running.clear()
                until(lambda load: wanted() == 1 and load.live == 1, 60)
                assert read_service(store, "s").students[0].idle
                student.running.set()
                until(is_settled, 60)
                assert operator.most <= NEEDED
                decisions = (read_wanted(store, "teachers", "s") or {})["decisions"]
                counts = [decision["count"] for decision in decisions]
                assert counts.count(1) == 1, decisions
                assert len(counts) <= 5, f"{decisions}: two steps up, a step down, two steps up"
        finally:
            student.close()
        assert student.steps > 100
        assert read_service(store, "s").students == (), "a student that ends removes its record at once"
