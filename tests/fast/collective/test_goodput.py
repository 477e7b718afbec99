"""Ledgers: their states sum to the time that passed, and what is in a store is shown by `edl status` and `report`."""

from __future__ import annotations

import json
import mmap
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.cli import main, output
from edl.collective import worker_status
from edl.collective.agent import status_publisher
from edl.collective.agent.status_publisher import MAX_EVENTS, Ledger, StatusPublisher
from edl.collective.agent.worker_group import WorkerGroup
from edl.collective.goodput import (
    MAX_SPANS,
    Event,
    JobSummary,
    NodeRecord,
    ProgressMark,
    Span,
    TimeCategory,
    encode_events,
    read_job,
    span_of,
    summarize,
)
from edl.collective.job_records import JobState, Member, World
from edl.collective.worker_status import Phase, WorkerStatus, WorkerStatusPage
from edl.discovery import Store
from edl.discovery.store import MAX_VALUE_BYTES
from edl.errors import ProtocolError, SettingsError
from tests.waiting import wait_until

SECOND = 1_000_000
WALL_S = 1_700_000_000.0
DOING = [TimeCategory.LOAD, TimeCategory.RENDEZVOUS, TimeCategory.TRAIN, TimeCategory.IDLE]
amounts = st.lists(st.integers(0, 10 * SECOND), min_size=TimeCategory.DOWN, max_size=TimeCategory.DOWN).map(
    lambda some: (*some, 0)  # DOWN is the job's alone: no node charges it
)
spans = st.lists(st.builds(Span, amounts, st.integers(1, 3), st.booleans()), max_size=30)


class Worker:
    def __init__(self) -> None:
        self.now_s = 0.0
        self._totals = dict.fromkeys(Phase, 0.0)
        self._fields = replace(WorkerStatusPage.from_env().read_status(), generation=0, phase_since=0.0, step_at=0.0)

    def spend(self, phase: Phase, seconds: float) -> None:
        if phase is not self._fields.phase:
            self._set(phase=phase, phase_since=self.now_s)
        self._totals[phase] += seconds
        self.now_s += seconds

    def finish(self, step: int, seconds: float = 1.0) -> None:
        self.spend(Phase.TRAIN, seconds)
        durations = (*self._fields.durations_s, seconds)[-64:]
        counted = {"samples": self._fields.samples + 8, "finished": self._fields.finished + 1}
        self._set(step=step, step_at=self.now_s, durations_s=durations, **counted)

    def restart(self, generation: int) -> None:
        self._set(generation=generation, phase=Phase.START, phase_since=self.now_s)

    def _set(self, **fields: object) -> None:
        self._fields = replace(self._fields, **fields)

    @property
    def status(self) -> WorkerStatus:
        return replace(self._fields, totals_s=dict(self._totals))


def seconds(ledger: Ledger) -> dict[str, float]:
    """What the ledger holds, states without time left out."""
    spans = ledger.record().spans
    spent = {state.name: sum(span.amounts[state] for span in spans) / SECOND for state in TimeCategory}
    return {name: amount for name, amount in spent.items() if amount}


def started(worker: Worker) -> Ledger:
    ledger = Ledger("a", 1, worker.now_s, WALL_S)
    ledger.observe(worker.now_s, TimeCategory.TRAIN, [worker.status])
    return ledger


def test_repeated_steps_are_rollback() -> None:
    worker = Worker()
    ledger = started(worker)
    for step in range(10):
        worker.finish(step)
    ledger.observe(worker.now_s, TimeCategory.RENDEZVOUS, [worker.status])
    worker.now_s += 2.0  # killed; the page goes on counting for nobody
    worker.restart(1)
    ledger.observe(worker.now_s, TimeCategory.TRAIN, [worker.status])
    worker.spend(Phase.LOAD, 0.5)
    ledger.observe(worker.now_s, TimeCategory.TRAIN, [worker.status])
    for step in range(6, 14):  # 6 to 9 for the second time; the glance that sees 9 sees 10 and 11 as well
        worker.finish(step)
        if step in (8, 11, 13):
            ledger.observe(worker.now_s, TimeCategory.TRAIN, [worker.status])
    assert seconds(ledger) == {"TRAIN": 14.0, "LOAD": 0.5, "ROLLBACK": 4.0, "RENDEZVOUS": 2.0}
    assert [span.main.name for span in ledger.record().spans][:4] == ["TRAIN", "RENDEZVOUS", "LOAD", "ROLLBACK"]


@pytest.mark.parametrize(("restored", "repeated"), [(60, 40), (90, 10), (100, 0)])
def test_new_agent_knows_earlier_steps(restored: int, repeated: int) -> None:
    """Also where the first glance at its empty status pages sees many steps, old ones and new ones."""
    worker = Worker()
    ledger = started(worker)
    worker.restart(1)
    ledger.observe(worker.now_s, TimeCategory.TRAIN, [worker.status])
    for step in range(restored + 1, 106):
        worker.finish(step, 0.125)
    ledger.observe(worker.now_s, TimeCategory.TRAIN, [worker.status], reached=100)
    trained = {"TRAIN": 5 * 0.125}
    assert seconds(ledger) == (trained | {"ROLLBACK": repeated * 0.125} if repeated else trained)


def test_hang_is_idle_but_for_its_step() -> None:
    worker = Worker()
    ledger = started(worker)
    for step in range(5):
        worker.finish(step, 2.0)
        ledger.observe(worker.now_s, TimeCategory.TRAIN, [worker.status])
    for _ in range(30):
        worker.spend(Phase.TRAIN, 1.0)
        ledger.observe(worker.now_s, TimeCategory.TRAIN, [worker.status])
    assert seconds(ledger) == {"TRAIN": 40.0}  # it may still finish
    ledger.observe(worker.now_s, TimeCategory.RENDEZVOUS, [worker.status])
    assert seconds(ledger) == {"TRAIN": 10.0, "ROLLBACK": 2.0, "IDLE": 28.0}


def test_the_slowest_worker_of_a_node_counts() -> None:
    fast, slow = Worker(), Worker()
    ledger = Ledger("a", 2, 0.0, WALL_S)
    ledger.observe(0.0, TimeCategory.TRAIN, [fast.status, slow.status])
    fast.finish(0, 3.0)
    slow.finish(0, 1.0)
    slow.spend(Phase.SAVE, 2.0)
    ledger.observe(3.0, TimeCategory.TRAIN, [fast.status, slow.status])
    assert seconds(ledger) == {"TRAIN": 1.0, "SAVE": 2.0}


def test_a_long_life_stays_small() -> None:
    worker, rng = Worker(), random.Random(0)
    ledger = started(worker)
    for step in range(4000):
        worker.finish(step, rng.random())
        worker.spend(rng.choice([Phase.SAVE, Phase.LOAD, Phase.PAUSE]), 3 * rng.random())
        ledger.observe(worker.now_s, rng.choice(DOING), [worker.status])
    record = ledger.record()
    assert len(record.spans) <= MAX_SPANS
    assert len(record.marks) <= 300
    assert record.marks[0].step < 10
    assert record.marks[-1].step > 3900
    assert sum(span.length_us for span in record.spans) == round(worker.now_s * SECOND)


events = st.one_of(
    st.tuples(st.just("spend"), st.sampled_from(Phase), st.floats(0, 100)),
    st.tuples(st.just("finish"), st.integers(0, 50), st.floats(0, 10)),
    st.tuples(st.just("restart"), st.integers(0, 9), st.floats(0, 5)),
    st.tuples(st.just("jump"), st.just(0), st.floats(-10, 10)),
    st.tuples(st.just("observe"), st.sampled_from(DOING), st.just(0.0)),
)


@given(st.lists(events, max_size=60), st.integers(0, 2))
def test_any_life_sums_to_its_time(life: list[tuple[str, int, float]], workers: int) -> None:
    ledger = Ledger("a", max(workers, 1), 0.0, WALL_S)
    boards = [Worker() for _ in range(workers)]
    now_s = latest_s = 0.0
    for number, (kind, value, length_s) in enumerate(life):
        now_s += length_s
        for worker in boards[: 1 + number % 2]:
            if kind == "spend":
                worker.spend(Phase(value), length_s)
            elif kind == "finish":
                worker.finish(value, length_s)
            elif kind == "restart":
                worker.restart(value)
        if kind == "observe":
            ledger.observe(now_s, TimeCategory(value), [worker.status for worker in boards])
            latest_s = max(latest_s, now_s)
        record = ledger.record()
        assert sum(span.length_us for span in record.spans) == round(latest_s * SECOND)
        assert all(amount >= 0 for span in record.spans for amount in span.amounts)
        assert record.steps_per_s >= 0


def record(began_s: float, *what: Span, node: str = "a", ended: bool = False) -> NodeRecord:
    return NodeRecord(node, round((WALL_S + began_s) * SECOND), 1, what, step=0, ended=ended)


def joined(*records: NodeRecord, silent_s: float = 0.0) -> JobSummary:
    """The job of these lives, so many seconds after the last of them."""
    until_us = max((one.until_us for one in records), default=0)
    return summarize("j", records, until_us + round(silent_s * SECOND))


def running(state: TimeCategory, length_s: float, workers: int = 1) -> Span:
    return span_of(state, round(length_s * SECOND), workers, running=True)


LIVES = st.lists(st.tuples(st.integers(0, 100 * SECOND), spans), max_size=5)


@given(LIVES, st.randoms(use_true_random=False))
def test_job_states_sum_to_elapsed_time(lives: list[tuple[int, list[Span]]], rng: random.Random) -> None:
    records = [
        NodeRecord("abc"[index % 3], began_us, 1, tuple(some), step=0) for index, (began_us, some) in enumerate(lives)
    ]
    job = joined(*records)
    lived = [one for one in records if sum(span.length_us for span in one.spans)]
    if lived:
        elapsed_us = max(one.until_us for one in lived) - min(one.began_us for one in lived)
        assert job.elapsed_s == pytest.approx(elapsed_us / SECOND)
    assert sum(span.length_us for span in job.spans) == round(job.elapsed_s * SECOND)
    assert sum(job.seconds.values()) == pytest.approx(job.elapsed_s)
    rng.shuffle(records)
    assert joined(*records) == job
    assert 0 <= (job.goodput or 0.0) <= 1


def test_nobody_alive_is_down() -> None:
    killed = record(0, running(TimeCategory.TRAIN, 10))
    later = record(15, span_of(TimeCategory.RENDEZVOUS, 5 * SECOND, 1), running(TimeCategory.TRAIN, 10))
    job = joined(later, killed)
    assert [(span.main.name, span.length_us // SECOND) for span in job.spans] == [
        ("TRAIN", 10),
        ("DOWN", 5),
        ("RENDEZVOUS", 5),
        ("TRAIN", 10),
    ]
    assert job.goodput == pytest.approx(20 / 30)
    assert job.worker_goodput == pytest.approx(20 / 25)
    assert joined(killed, silent_s=30).goodput == 0.25


def test_slowest_member_decides() -> None:
    fast = record(0, running(TimeCategory.TRAIN, 10, workers=3), node="fast")
    slow = record(0, running(TimeCategory.TRAIN, 5), running(TimeCategory.SAVE, 5), node="slow")
    waiting = record(0, span_of(TimeCategory.RENDEZVOUS, 10 * SECOND, 1), node="waiting")
    job = joined(fast, slow, waiting)
    assert job.goodput == 0.5
    assert job.worker_goodput == pytest.approx((30 + 5) / 50)
    assert [span.workers for span in job.spans] == [4, 4]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time by which a page counts."""
    made = SimpleNamespace(now_s=100.0, monotonic=lambda: made.now_s)
    monkeypatch.setattr(worker_status, "time", made)
    return made


@pytest.fixture
def page(tmp_path: Path) -> WorkerStatusPage:
    return WorkerStatusPage.create(tmp_path / "board")


def test_totals_sum_to_the_pages_age(clock: SimpleNamespace, page: WorkerStatusPage) -> None:
    """Also where the beginning of a phase turns out to have been of another one."""
    page.record_worker_start(0)
    page.enter_phase(Phase.LOAD)
    clock.now_s += 1.0
    page.enter_phase(Phase.TRAIN)
    clock.now_s += 4.0
    with page.in_phase(Phase.SAVE):
        clock.now_s += 0.5
        assert page.read_status().phase is Phase.SAVE
    with page.in_phase(Phase.AGREE):
        clock.now_s += 2.0
        page.reassign_time(Phase.SAVE, 1.5)
        page.reassign_time(Phase.SAVE, -1.0)
    status = page.read_status()
    spent = {phase: seconds for phase, seconds in status.totals_s.items() if seconds}
    assert spent == {Phase.LOAD: 1.0, Phase.TRAIN: 4.0, Phase.SAVE: 2.0, Phase.AGREE: 0.5}
    assert (status.phase, status.phase_since) == (Phase.TRAIN, 107.5)
    with page.in_phase(Phase.AGREE):
        clock.now_s += 1.0
        page.reassign_time(Phase.SAVE, 100.0)
    assert page.read_status().totals_s[Phase.SAVE] == 3.0, "no more than has passed"


def interrupted(call: Callable[[], Any], action: Callable[[], object]) -> Any:
    """Make a call, with `action` before each of the status page's operations: those of Python's interpreter."""

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename != worker_status.__file__:
            return None
        frame.f_trace_opcodes = True
        action()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return call()
    finally:
        sys.settrace(before)


def test_no_half_of_a_change_is_read(clock: SimpleNamespace, page: WorkerStatusPage, tmp_path: Path) -> None:
    """Neither of a worker that was killed in the middle, nor of one that goes on while the agent reads."""
    outer, inner = page.in_busy_phase("outer", 600.0), page.in_busy_phase("inner", 5.0)
    changes: list[Callable[[], object]] = [
        lambda: page.record_worker_start(1),
        lambda: page.finish_step(0, 8),
        lambda: page.enter_phase(Phase.TRAIN),
        lambda: page.finish_step(1, 8),
        outer.__enter__,
        inner.__enter__,
        lambda: inner.__exit__(None, None, None),
        lambda: outer.__exit__(None, None, None),
        lambda: page.reassign_time(Phase.SAVE, 0.5),
        lambda: page.record_pause(1),
        page.record_resume,
    ]
    with (tmp_path / "board").open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    images = [memory[:]]
    finished = [0]

    def note_image() -> None:
        if memory[:] != images[-1]:
            images.append(memory[:])

    for change in changes:
        clock.now_s += 1.0
        interrupted(change, note_image)
        note_image()
        finished.append(len(images) - 1)

    def status_at(image: int, pace: float = 0.0) -> WorkerStatus:
        """Read the page, whose worker makes `pace` steps of a change during each of the reader's operations."""
        made = float(image)

        def go_on() -> None:
            nonlocal made
            before, made = int(made), min(made + pace, len(images) - 1)
            if int(made) != before:
                memory[:] = images[int(made)]

        memory[:] = images[image]
        return interrupted(page.read_status, go_on) if pace else page.read_status()

    whole = [status_at(image) for image in finished]
    for image in range(len(images)):
        assert status_at(image) in whole, "killed"
        for pace in (1.0, 0.4, 0.1, 0.03):
            assert status_at(image, pace) in whole, "read while it goes on"


def test_finished_steps_are_counted(page: WorkerStatusPage) -> None:
    for generation, steps in enumerate(((61, 62, 64, 63, 64), (65,))):
        page.record_worker_start(generation)
        for step in steps:
            page.finish_step(step, samples=32)
    status = page.read_status()
    assert (status.step, status.finished, status.samples, len(status.durations_s)) == (65, 6, 192, 3)


def test_what_was_written_is_read_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a node that comes back, whose former life stays as it was."""
    waits = cast(WorkerGroup, SimpleNamespace(generation=0, read_statuses=list))
    for life in range(2):
        monkeypatch.setattr(time, "time", lambda life=life: NOW_S + 60 * life)
        publisher = StatusPublisher(store, "job", "host:1/a b", 2)
        publisher.follow_workers(waits)
        publisher.record_event("join", f"life {life}", 3)
        publisher.charge_time(TimeCategory.RENDEZVOUS, replicated_us=7)
        publisher.close()
    back = read_job(store, "job")
    assert [(node.node, node.state, node.began, node.record.replicated_us) for node in back.nodes] == [
        ("host:1/a b", "left", NOW_S + 60, 7),
        ("host:1/a b", "left", NOW_S, 7),
    ]
    assert [(event.node, event.kind, event.text, event.generation, event.at) for event in back.events] == [
        ("host:1/a b", "join", "life 0", 3, NOW_S),
        ("host:1/a b", "join", "life 1", 3, NOW_S + 60),
    ]
    assert back.state == "down"
    store.put("jobs/job/world", World(generation=3).encode())
    assert read_job(store, "job").generation == 3
    store.put("jobs/j-7051cb99/world", World(generation=3).encode())
    meant = {"other": "there is j-7051cb99, job", "jobb": "did you mean 'job'", "j": "did you mean 'j-7051cb99'"}
    for name, words in meant.items():
        with pytest.raises(SettingsError, match=f"there is no job '{name}' in this store; {words}"):
            read_job(store, name)


@pytest.mark.parametrize("name", ["", "a/b", "..", "a\n"])
def test_names_that_are_no_keys(name: str, store: Store) -> None:
    with pytest.raises(SettingsError, match="job"):
        read_job(store, name)


def test_largest_ledger_and_events_fit() -> None:
    spans = tuple(span_of(TimeCategory(index % 2), 2**42 + index, 4096, running=True) for index in range(MAX_SPANS))
    marks = tuple(ProgressMark(2**48 + index, 2**40, 2**50) for index in range(300))
    assert len(NodeRecord("a", 2**50, 4096, spans, marks).encode()) < 60_000
    assert len(encode_events([Event(NOW_S, "a", "error", "x" * 1000)] * MAX_EVENTS)) < MAX_VALUE_BYTES


GOOD = json.loads(record(0, running(TimeCategory.LOAD, 1.5)).encode())

DAMAGES: list[dict[str, object]] = [
    {"spans": [[1, 1, 2]]},
    {"spans": [[1, 1, -5, 0, 0, 0, 0, 0, 0]]},
    {"spans": [[1, 1, 1e300, 0, 0, 0, 0, 0, 0]]},
    {"marks": [[1]]},
    {"steps_per_s": float("nan")},
    {"node": 7},
    {"began_us": True},
    {"step": -2},
    {"reached": 1.5},
]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"\xff", "UnicodeDecodeError"),
        (b"[1]", "no version"),
        (b'{"version": 99}', "version 99"),
        (b'{"version": 1}', "node"),
        *((json.dumps({**GOOD, **damage}).encode(), "instead of|in place of|expected") for damage in DAMAGES),
    ],
)
def test_what_is_no_ledger_is_named(value: bytes, words: str, store: Store) -> None:
    store.put("jobs/j/ledger/a/1", value)
    with pytest.raises(ProtocolError, match=words) as caught:
        read_job(store, "j")
    assert "jobs/j/ledger/a/1" in str(caught.value)


def test_late_agent_asks_for_earlier_steps(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_publisher, "_WRITE_EVERY_S", 0.01)
    put(store, "job", NodeRecord("before", 1, 1, generation=3, step=7))
    publisher = StatusPublisher(store, "job", "late", 1)
    came_late = SimpleNamespace(generation=5, read_statuses=list)
    publisher.follow_workers(cast(WorkerGroup, came_late))

    def known() -> list[int]:
        publisher.charge_time(TimeCategory.TRAIN)
        return [one.record.reached for one in read_job(store, "job").nodes if one.record.reached >= 0]

    wait_until(lambda: known() == [7], "steps that were finished before are charged as new ones")
    publisher.close()


NOW_S = 1_700_000_000.0


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of day stands still: a node that is silent for five seconds is lost."""
    monkeypatch.setattr(time, "time", lambda: NOW_S)


def put(store: Store, job: str, record: NodeRecord, *events: Event) -> None:
    """What an agent writes."""
    life = f"{quote(record.node, safe='')}/{record.began_us}"
    store.put(f"jobs/{job}/ledger/{life}", record.encode())
    store.put(f"jobs/{job}/events/{life}", encode_events(events))


def add_node(store: Store, node: str, ago_s: float, trained_s: float, *events: Event) -> None:
    """A node of two workers that began `ago_s` ago, met the others for a second, and trained ten steps."""
    ledger = Ledger(node, 2, 0.0, NOW_S - ago_s)
    status = replace(
        WorkerStatusPage.from_env().read_status(), generation=3, phase=Phase.TRAIN, phase_since=1.0, step_at=1.0
    )
    ledger.observe(0.0, TimeCategory.RENDEZVOUS, ())
    ledger.observe(1.0, TimeCategory.TRAIN, [status] * 2)
    totals = {**status.totals_s, Phase.TRAIN: status.totals_s[Phase.TRAIN] + trained_s}
    done = replace(status, totals_s=totals, step=9, step_at=1.0 + trained_s, samples=640, finished=10)
    ledger.observe(1.0 + trained_s, TimeCategory.TRAIN, [done] * 2)
    put(store, "resnet", ledger.record(), *events)


def put_world(store: Store, *nodes: str, state: JobState = JobState.RUNNING) -> None:
    members = tuple(Member(name, "10.0.0.1", 29400, 2, 2 * place) for place, name in enumerate(nodes))
    store.put("jobs/resnet/world", World(3, state, members, "b joined").encode())


def test_members_goodput_and_events(store: Store, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    add_node(store, "a", 10.0, 9.0, Event(NOW_S, "a", "join", "2 workers", 3))
    add_node(store, "b", 10.0, 9.0)
    add_node(store, "gone", 60.0, 2.0, Event(NOW_S, "b", "kill", "rank 1"))
    put_world(store, "a", "b")
    assert main(["status", "resnet", "--store", url]) == 0
    out = capsys.readouterr().out
    assert "job resnet: running, generation 3, 4 ranks, step 9" in out
    # 2 + 9 seconds of training in the 60 since the first node began; nobody was there for 47.
    assert "goodput 18.3% of 60 s · train 11 s · rendezvous 2.00 s · down 47 s" in out
    for line in (r"a +0-1 +train +3 +9 ", r"b +2-3 ", r"gone +lost ", r"\d\d:\d\d:\d\d  join +a  2 workers"):
        assert re.search(line, out), line

    assert main(["status", "resnet", "--json", "--store", url]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["job"], told["state"], told["step"], told["generation"]) == ("resnet", "running", 9, 3)
    assert told["goodput"] == pytest.approx(11 / 60, abs=1e-6)
    assert sum(told["seconds"].values()) == pytest.approx(told["elapsed_s"])
    (node,) = (each for each in told["nodes"] if each["node"] == "a")
    assert (node["ranks"], node["samples_per_s"]) == ([0, 1], pytest.approx(1280 / 9, abs=0.01))
    assert [(event["node"], event["kind"]) for event in told["events"]] == [("a", "join"), ("b", "kill")]


def test_the_age_of_replicas_is_shown(store: Store, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    add_node(store, "b", 10.0, 9.0)
    put_world(store, "a", "b")
    at = round((NOW_S - 600.0) * 1e6)
    spans = (span_of(TimeCategory.TRAIN, 600_000_000, 2, running=True),)
    put(store, "resnet", NodeRecord("a", at, 2, spans, replicated_us=at))
    assert main(["status", "resnet", "--store", url]) == 0
    assert re.search(r"replica.*a +0-1 .* 10 min 00 s old", capsys.readouterr().out, re.DOTALL)
    assert main(["status", "resnet", "--json", "--store", url]) == 0
    ages = {node["node"]: node["replica_age_s"] for node in json.loads(capsys.readouterr().out)["nodes"]}
    assert ages == {"a": 600.0, "b": None}


def test_jobs_that_begin_end_or_are_down(store: Store, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    put(store, "resnet", NodeRecord("a", round(NOW_S * SECOND), 1))
    assert main(["status", "resnet", "--store", url]) == 0
    out = capsys.readouterr().out
    assert re.search(r"job resnet: starting, \d+ nodes? so far", out)
    assert "goodput unknown" in out
    assert main(["report", "resnet", "--store", url]) == 2
    assert "no ledger yet" in capsys.readouterr().err

    for entry in store.list("jobs/resnet/"):
        store.delete(entry.key)
    put_world(store, "a", state=JobState.DONE)
    assert main(["status", "resnet", "--store", url]) == 0
    assert "job resnet: done" in capsys.readouterr().out

    add_node(store, "a", 3600.0, 9.0)
    assert main(["status", "resnet", "--watch", "--json", "--store", url]) == 0  # and the watch ends at once
    told = json.loads(capsys.readouterr().out)
    assert (told["elapsed_s"], told["seconds"]["down"]) == (pytest.approx(10.0), 0)

    put_world(store, "a")
    assert main(["status", "resnet", "--json", "--store", url]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["seconds"]["down"]) == ("down", pytest.approx(3590.0))


def test_all_jobs_are_listed(store: Store, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--store", url]) == 0
    assert "There are no jobs in this store" in capsys.readouterr().out
    add_node(store, "a", 10.0, 9.0)
    put_world(store, "a", state=JobState.DONE)
    assert main(["status", "--store", url]) == 0
    assert capsys.readouterr().out.startswith("job resnet: done")
    assert main(["status", "--json", "--store", url]) == 0
    assert [job["job"] for job in json.loads(capsys.readouterr().out)] == ["resnet"]
    store.put("jobs/foreign/world", b"{}")
    assert main(["status", "--store", url]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("jobs/foreign/world cannot be read")
    for wrong in ("--forget", "--kube"):
        assert main(["status", wrong, "--store", url]) == 2
        assert "name the JOB" in capsys.readouterr().err


def test_names_cannot_control_the_terminal(store: Store, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    add_node(store, "a\x1b[2J", 10.0, 9.0, Event(NOW_S, "a", "join", "\x1b[31m[bold]x"))
    put_world(store, "a\x1b[2J")
    for command in ("status", "report"):
        assert main([command, "resnet", "--store", url]) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "[bold]x" in out


def test_watch_repeats_until_interrupted(
    store: Store, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_node(store, "a", 10.0, 9.0)
    put_world(store, "a")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise KeyboardInterrupt
        add_node(store, "a", 10.0, 9.0, Event(NOW_S, "a", "hang", "no step for 30 s"))

    monkeypatch.setattr(output, "time", SimpleNamespace(sleep=pause))
    assert main(["status", "resnet", "--watch", "--json", "--store", url]) == 130
    first, second = (json.loads(line)["events"] for line in capsys.readouterr().out.splitlines())
    assert (first, [event["kind"] for event in second]) == ([], ["hang"])


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture_is_a_file(store: Store, url: str, suffix: str, tmp_path: Path) -> None:
    add_node(store, "node-$\\x$", 10.0, 9.0, Event(NOW_S, "node-$\\x$", "join", "2 workers"))
    put_world(store)
    out = tmp_path / f"job{suffix}"
    assert main(["report", "resnet", "--store", url, "--out", str(out)]) == 0
    assert out.stat().st_size > 10_000
    assert out.read_bytes().startswith(b"\x89PNG") is (suffix == ".png")


@pytest.mark.parametrize("name", ["job.txt", "job", "no/such/folder/job.png"])
def test_impossible_picture_is_one_line(
    name: str, store: Store, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_node(store, "a", 10.0, 9.0)
    assert main(["report", "resnet", "--store", url, "--out", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("edl report: ")
    assert error.count("\n") == 1
