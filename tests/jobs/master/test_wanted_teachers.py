"""Real teachers, a real student and the advisor: as many teachers as the formula says, and no more."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from edl.background import start_call
from edl.discovery import Store
from edl.distill import DistillReader
from edl.load_reporting import ServiceLoad, read_service, read_wanted
from edl.master.scaling import advisor as module
from edl.master.scaling.advisor import AdvisorSettings, ScalingAdvisor
from edl.master.scaling.teachers import (
    TeacherDecision,
    TeacherObservation,
    TeacherScalingSettings,
    TeacherScalingState,
    decide_teachers,
    required_teachers,
)
from edl.testing import LocalTeacher
from tests.waiting import DEADLINE_S, wait_until

ROWS = 8  # of a batch
ROW_S = 0.005  # a teacher computes 200 rows/s
STEP_S = 0.0143  # the student asks for 560 rows/s: 4 teachers, on a machine with nothing else to do
SCALING = TeacherScalingSettings(up_s=1.5, down_s=3.0, rates_s=2.5, judge_s=4.0)


class Operator:
    """Starts and ends teachers as it is wanted, as an operator of a cluster does."""

    def __init__(self, url: str) -> None:
        self._url, self.most = url, 0
        self.teachers: list[LocalTeacher] = []
        self.draining: list[LocalTeacher] = []

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
        self.reader.set_batch_generator(lambda: itertools.repeat((np.ones((ROWS, 4), np.float32),)))
        self.running, self._ended = threading.Event(), threading.Event()
        self.running.set()
        self.steps = 0
        self._training = start_call("edl-test", self._train)

    def _train(self) -> None:
        for _ in self.reader():
            if self._ended.wait(STEP_S):
                return
            self.steps += 1
            self.running.wait()

    def close(self) -> None:
        self._ended.set()
        self.running.set()
        self._training.result(DEADLINE_S)
        self.reader.close()


@pytest.fixture
def url(url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("EDL_LOAD_INTERVAL_S", "0.2")
    monkeypatch.setenv("EDL_LOAD_WINDOW_S", "1.5")
    return url


@pytest.fixture
def operator(url: str) -> Iterator[Operator]:
    operator = Operator(url)
    yield operator
    for teacher in operator.teachers + operator.draining:
        teacher.close()


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> list[TeacherObservation]:
    """What the advisor was shown, which on a busy machine is not what this test sees a moment later."""
    observed: list[TeacherObservation] = []

    def decide(
        state: TeacherScalingState, observation: TeacherObservation, settings: TeacherScalingSettings
    ) -> tuple[TeacherScalingState, TeacherDecision]:
        observed.append(observation)
        return decide_teachers(state, observation, settings)

    monkeypatch.setattr(module, "decide_teachers", decide)
    return observed


@pytest.mark.timeout(600)
def test_teachers_follow_the_formula(
    url: str, store: Store, operator: Operator, observed: list[TeacherObservation]
) -> None:
    """How fast a teacher and the student are is measured: a starved machine's figures are others, not the rule."""
    operator.follow(1)
    operator.teachers[0].wait_ready()
    student = Student(url)

    def wanted() -> int:
        found = read_wanted(store, "teachers", "s")
        return int(found["count"]) if found is not None else len(operator.teachers)

    def until(holds: Callable[[ServiceLoad], object]) -> None:
        def looked() -> object:
            operator.follow(wanted())
            return holds(read_service(store, "s"))

        wait_until(looked, f"{holds}", 2 * DEADLINE_S)

    def is_settled(load: ServiceLoad) -> bool:
        """Whether there are as many teachers as the load takes: no move, neither up nor down, follows from it."""
        demand, rate = load.demand, load.rate
        if not demand or rate is None or load.live < 2 or load.live != wanted():
            return False
        enough = demand <= SCALING.up_above * load.live * rate and (load.wait_share or 0) < 0.2
        return enough and SCALING.down_below * (load.live - 1) * rate <= demand

    try:
        until(lambda load: load.live == 1 and (load.wait_share or 0) > 0.3)
        with ScalingAdvisor(store, AdvisorSettings(SCALING, interval_s=0.2, refresh_s=0.5, ttl_s=10.0)):
            until(is_settled)
            student.running.clear()
            until(lambda load: wanted() == 1 and load.live == 1 and all(found.idle for found in load.students))
            student.running.set()
            until(is_settled)
            formula = max(required_teachers(observation, SCALING) or 1 for observation in observed)
            assert 2 <= operator.most <= formula, "never more than the formula says"
            decisions = (read_wanted(store, "teachers", "s") or {})["decisions"]
            assert all(found["from"] != found["count"] for found in decisions), "a decision that moves nothing"
            assert 1 in [found["count"] for found in decisions], decisions
    finally:
        student.close()
    assert student.steps > 10
    until(lambda load: not load.students)


def test_master_writes_what_is_wanted(url: str, store: Store) -> None:
    since = {"t": 0.0, "rows": 0, "compute_s": 0.0}
    now = {"t": 10.0, "rows": 900, "compute_s": 9.0, "workers": 1, "state": "ready"}
    command = [sys.executable, "-m", "edl", "master", "j", "--store", url, "--stay", "--min-teachers", "2"]
    store.put("load/s/teachers/a", json.dumps({"v": 1, "id": "a", **now, "since": since}).encode())
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as master:
        try:
            found = wait_until(lambda: read_wanted(store, "teachers", "s")) or {}
            assert (found["count"], found["now"]) == (2, 1), "the least that the command says"
            master.terminate()
            _, log = master.communicate(timeout=DEADLINE_S)
        finally:
            master.kill()
    assert master.returncode == 128 + 15
    assert "Traceback" not in log, log
