"""The batch queue: bounded, never mixing shapes, and fair between clients, with nothing lost."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edl_serving.batching.batch_queue import BatchQueue, InferenceJob

FOREVER = float("inf")
BATCH = 8
CLIENTS = ("a", "b", "c")


def job(
    rows: int,
    client: str = "a",
    *,
    arrived: float = 0.0,
    shape: int = 1,
    nbytes: int = 0,
    answer: int = 0,
    deadline: float = FOREVER,
) -> InferenceJob:
    nothing: Any = None
    return InferenceJob(
        nothing, rows, ((shape,),), arrived, deadline, client=client, nbytes=nbytes + answer, answer_nbytes=answer
    )


def queue_of(*jobs: InferenceJob, delay_s: float = 0.0) -> BatchQueue:
    queue = BatchQueue(BATCH, delay_s, 1000)
    for one in jobs:
        assert queue.push_job(one) == []
    return queue


def take_part(queue: BatchQueue, now: float = 0.0) -> list[tuple[InferenceJob, int]]:
    """Take a batch, and put the rest of a large job back, as a worker does: the jobs, and rows of each computed."""
    taken = []
    for one in queue.pop_batch(now).jobs:
        rows = min(one.rows - one.done, BATCH)
        one.done += rows
        taken.append((one, rows))
        if one.done < one.rows:
            queue.requeue_job(one)
    return taken


def test_a_full_or_late_batch_is_due() -> None:
    empty = BatchQueue(BATCH, 1.0, 100).pop_batch(0.0)
    assert (empty.jobs, empty.expired, empty.wait_s) == ([], [], None)
    first, second = job(4, arrived=10.0), job(4, arrived=10.25)
    queue = queue_of(first, delay_s=1.0)
    assert queue.pop_batch(10.5).wait_s == 0.5
    queue.push_job(second)
    assert queue.pop_batch(10.5).jobs == [first, second]
    queue.push_job(first)
    assert queue.pop_batch(11.0).jobs == [first]
    large = job(BATCH + 1)
    assert queue_of(large, job(1), delay_s=5.0).pop_batch(0.0).jobs == [large], "a job above a batch goes alone"


def test_jobs_expire_at_their_deadlines() -> None:
    late, last, patient = job(1, deadline=1.0), job(1, deadline=2.0), job(1)
    queue = queue_of(late, last, patient)
    taken = queue.pop_batch(1.0)
    assert (taken.expired, taken.jobs, queue.rows) == ([late], [last, patient], 0)


def test_a_full_batch_of_another_shape() -> None:
    young, full = job(1, arrived=1.0, shape=1), job(BATCH, arrived=1.1, shape=2)
    queue = queue_of(young, full, delay_s=1.0)
    assert queue.pop_batch(1.2).jobs == [full]
    assert queue.pop_batch(2.0).jobs == [young]


def test_a_newcomer_is_in_the_next_batch() -> None:
    """Whatever its shape: a client with one request does not wait behind another one's fifty."""
    for shape in (1, 2):
        queue = queue_of(*(job(4, "greedy") for _ in range(50)))
        queue.pop_batch(0.0)
        late = job(1, "modest", arrived=5.0, shape=shape)
        queue.push_job(late)
        assert late in queue.pop_batch(5.0).jobs


def test_a_queue_takes_its_last_row_and_byte() -> None:
    queue, last = BatchQueue(BATCH, 0.0, 10, max_queue_bytes=100), job(6, nbytes=60)
    assert queue.push_job(job(4, nbytes=40)) == queue.push_job(last) == []
    queue.remove_job(last)
    for rows, nbytes in ((7, 60), (6, 61)):
        one = job(rows, nbytes=nbytes)
        assert queue.push_job(one) == [one]
    for rows, nbytes in ((2, 10), (1, 20)):  # of five jobs, of which the last one makes room for that of another client
        queue = BatchQueue(BATCH, 0.0, 10, max_queue_bytes=100)
        jobs = [job(rows, nbytes=nbytes, arrived=float(number)) for number in range(5)]
        for one in jobs:
            assert queue.push_job(one) == []
        assert queue.push_job(job(rows, "b", nbytes=nbytes)) == jobs[-1:]


def test_a_large_answer_waits_alone() -> None:
    queue = BatchQueue(BATCH, 0.0, 1000, max_queue_bytes=100)
    large, small = job(2 * BATCH, "a", nbytes=10, answer=500), job(1, "b", nbytes=1)
    assert queue.push_job(large) == []
    assert queue.nbytes == 100
    assert queue.push_job(job(1, "a", nbytes=1)) != [], "its answer takes all of the queue"
    assert take_part(queue) == [(large, BATCH)]
    assert take_part(queue) == [(large, BATCH)]
    assert queue.nbytes == 0
    assert queue.push_job(small) == []
    assert queue.push_job(large) == [large], "until nothing else waits"
    queue.remove_job(small)
    assert queue.push_job(job(1, "a", nbytes=101)) != [], "too large without its answer"
    assert queue.nbytes == 0


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 3 * BATCH), min_size=1, max_size=6),
    st.lists(st.integers(1, 3 * BATCH), min_size=1, max_size=6),
)
def test_backlogged_clients_get_equal_rows(ours: list[int], theirs: list[int]) -> None:
    queue = BatchQueue(BATCH, 0.0, 1 << 30)
    served = {"a": 0, "b": 0}
    for turn in range(100):
        for client, sizes in (("a", ours), ("b", theirs)):
            queue.push_job(job(sizes[turn % len(sizes)] + 3 * BATCH, client, arrived=float(turn)))
        for one, rows in take_part(queue, float(turn)):
            served[one.client] += rows
        # Start-time fair queueing promises the largest part of each; one that did not fit into a batch, one more.
        assert abs(served["a"] - served["b"]) <= 3 * BATCH


class Fairness(RuleBasedStateMachine):
    """Against plain lists of each client's jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = BatchQueue(BATCH, 0.0, 40, max_queue_bytes=400)
        self.waiting: dict[str, list[InferenceJob]] = {client: [] for client in CLIENTS}
        self.now = 0.0

    def share(self, client: str) -> float:
        jobs = self.waiting[client]
        return max(sum(one.rows - one.done for one in jobs) / 40, sum(one.nbytes for one in jobs) / 400)

    @rule(rows=st.integers(1, 20), client=st.sampled_from(CLIENTS), shape=st.integers(1, 2), nbytes=st.integers(0, 150))
    def push(self, rows: int, client: str, shape: int, nbytes: int) -> None:
        self.now += 1.0
        one = job(rows, client, arrived=self.now, shape=shape, nbytes=nbytes)
        everyone = [other for jobs in self.waiting.values() for other in jobs]
        fits = (
            sum(other.rows - other.done for other in everyone) + rows <= 40
            and sum(other.nbytes for other in everyone) + nbytes <= 400
        )
        refused = self.queue.push_job(one)
        if fits:
            assert refused == []
        if refused == [one]:
            return
        self.waiting[client].append(one)
        assert one not in refused
        for other in refused:
            assert other.client != client
            self.waiting[other.client].remove(other)
            newer = [each for each in self.waiting[other.client] if each.arrived > other.arrived]
            assert not newer, "an older job left where a newer one stayed"
        for other_client in {other.client for other in refused}:
            assert self.share(other_client) >= self.share(client), "one that has less gave way"

    @precondition(lambda self: any(self.waiting.values()))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([other for jobs in self.waiting.values() for other in jobs]))
        assert self.queue.remove_job(one)
        assert not self.queue.remove_job(one)
        self.waiting[one.client].remove(one)

    @rule()
    def take(self) -> None:
        taken = take_part(self.queue, self.now)
        assert bool(taken) == any(self.waiting.values())
        assert sum(rows for _, rows in taken) <= BATCH
        assert len({one.shapes for one, _ in taken}) <= 1
        for one, _ in taken:
            alike = [other for other in self.waiting[one.client] if other.shapes == one.shapes]
            assert alike[0] is one, "a job of the same client and shape was overtaken"
            if one.done == one.rows:
                self.waiting[one.client].remove(one)

    @invariant()
    def counts_agree(self) -> None:
        everyone = [one for jobs in self.waiting.values() for one in jobs]
        assert len(self.queue) == len(everyone)
        assert self.queue.rows == sum(one.rows - one.done for one in everyone)
        assert self.queue.nbytes == sum(one.nbytes for one in everyone)

    def teardown(self) -> None:
        everyone = {id(one) for jobs in self.waiting.values() for one in jobs}
        assert {id(one) for one in self.queue.clear()} == everyone
        assert self.queue.rows == len(self.queue) == 0


TestFairness = Fairness.TestCase
TestFairness.settings = settings(max_examples=25, stateful_step_count=30)
