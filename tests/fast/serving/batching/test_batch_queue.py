"""The batch queue as a state machine: bounded, fair, and never mixing shapes."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edl_serving.batching.batch_queue import BatchQueue
from edl_serving.batching.job import InferenceJob

FOREVER = float("inf")


def job(rows: int, arrived: float, shape: int = 1, deadline: float = FOREVER) -> InferenceJob:
    nothing: Any = None
    return InferenceJob(nothing, rows, ((shape,),), arrived, deadline)


def test_an_empty_queue_waits_for_nothing() -> None:
    taken = BatchQueue(8, 1.0, 100).pop_batch(0.0)
    assert (taken.jobs, taken.expired, taken.wait_s) == ([], [], None)


def test_a_full_or_late_batch_is_due() -> None:
    queue = BatchQueue(8, 1.0, 100)
    first, second = job(4, 10.0), job(4, 10.25)
    queue.push_job(first)
    assert queue.pop_batch(10.5).wait_s == 0.5
    queue.push_job(second)
    assert queue.pop_batch(10.5).jobs == [first, second]
    queue.push_job(first)
    assert queue.pop_batch(11.0).jobs == [first]


def test_no_delay_makes_a_batch_due() -> None:
    queue = BatchQueue(8, 0.0, 100)
    first = job(1, 10.0)
    queue.push_job(first)
    assert queue.pop_batch(10.0).jobs == [first]


def test_a_job_that_does_not_fit_is_next() -> None:
    queue = BatchQueue(8, 0.0, 100)
    jobs = [job(5, 1.0), job(5, 1.1), job(1, 1.2)]
    for one in jobs:
        queue.push_job(one)
    assert queue.pop_batch(2.0).jobs == [jobs[0]]
    assert queue.pop_batch(2.0).jobs == jobs[1:]


def test_a_full_batch_of_another_shape() -> None:
    queue = BatchQueue(8, 1.0, 100)
    young, full = job(1, 1.0, shape=1), job(8, 1.1, shape=2)
    queue.push_job(young)
    queue.push_job(full)
    assert queue.pop_batch(1.2).jobs == [full]
    assert queue.pop_batch(2.0).jobs == [young]


def test_the_queue_is_bounded_in_rows() -> None:
    queue = BatchQueue(8, 0.0, 10)
    assert queue.push_job(job(6, 0.0)) == []
    large = job(5, 0.0)
    assert queue.push_job(large) == [large]
    assert queue.push_job(job(4, 0.0)) == []
    assert queue.rows == 10


@given(st.integers(9, 50))
def test_a_job_above_a_batch_goes_alone(rows: int) -> None:
    queue = BatchQueue(8, 5.0, 100)
    large, small = job(rows, 0.0), job(1, 0.0)
    queue.push_job(large)
    queue.push_job(small)
    assert queue.pop_batch(0.0).jobs == [large]


class Model(RuleBasedStateMachine):
    """Against a plain list of the jobs that wait. All times are sums of powers of two, so floats add up exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = BatchQueue(8, 0.5, 40)
        self.waiting: list[InferenceJob] = []
        self.now = 0.0

    @rule(rows=st.integers(1, 12), shape=st.integers(1, 3), patience=st.sampled_from([0.125, 1.0, FOREVER]))
    def push(self, rows: int, shape: int, patience: float) -> None:
        one = job(rows, self.now, shape, self.now + patience)
        fits = sum(other.rows for other in self.waiting) + rows <= 40
        assert self.queue.push_job(one) == ([] if fits else [one])
        if fits:
            self.waiting.append(one)

    @rule(seconds=st.sampled_from([0.0625, 0.25, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(one)
        assert self.queue.remove_job(one)
        assert not self.queue.remove_job(one)

    @rule()
    def take(self) -> None:
        taken = self.queue.pop_batch(self.now)
        assert taken.expired == [one for one in self.waiting if one.deadline <= self.now] or set(
            map(id, taken.expired)
        ) == {id(one) for one in self.waiting if one.deadline <= self.now}
        self.waiting = [one for one in self.waiting if one.deadline > self.now]
        if not taken.jobs:
            assert (taken.wait_s is None) == (not self.waiting)
            assert taken.wait_s is None or 0 < taken.wait_s <= 0.5
            return
        shapes = {one.shapes for one in taken.jobs}
        assert len(shapes) == 1
        assert len(taken.jobs) == 1 or sum(one.rows for one in taken.jobs) <= 8
        alike = [one for one in self.waiting if one.shapes in shapes]
        assert alike[: len(taken.jobs)] == taken.jobs  # nobody overtakes
        self.waiting = [one for one in self.waiting if one not in taken.jobs]
        overdue = [one for one in self.waiting if one.arrived + 0.5 <= self.now]
        if overdue and taken.jobs[0].arrived + 0.5 <= self.now:
            assert taken.jobs[0].arrived <= min(one.arrived for one in overdue)

    @invariant()
    def counts_agree(self) -> None:
        assert self.queue.rows == sum(one.rows for one in self.waiting)
        assert len(self.queue) == len(self.waiting)

    def teardown(self) -> None:
        assert set(map(id, self.queue.clear())) == set(map(id, self.waiting))
        assert self.queue.rows == len(self.queue) == 0


TestBatchQueue = Model.TestCase
