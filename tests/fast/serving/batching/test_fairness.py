"""The batch queue between clients: turns by rows, room for each, nothing lost, parts of a large job in between."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edl_serving.batching.batch_queue import BatchQueue
from edl_serving.batching.job import InferenceJob

FOREVER = float("inf")
BATCH = 8
CLIENTS = ("a", "b", "c")


def job(
    rows: int, client: str, *, arrived: float = 0.0, shape: int = 1, nbytes: int = 0, answer: int = 0
) -> InferenceJob:
    nothing: Any = None
    return InferenceJob(
        nothing, rows, ((shape,),), arrived, FOREVER, client=client, nbytes=nbytes + answer, answer_nbytes=answer
    )


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


def test_a_newcomer_is_in_the_next_batch() -> None:
    queue = BatchQueue(BATCH, 0.0, 1000)
    for _ in range(50):
        queue.push_job(job(4, "greedy"))
    queue.pop_batch(0.0)
    late = job(1, "modest", arrived=5.0)
    queue.push_job(late)
    assert late in queue.pop_batch(5.0).jobs, "a client with one request waited behind another one's fifty"


def test_a_newcomer_of_another_shape_is_next() -> None:
    queue = BatchQueue(BATCH, 0.0, 1000)
    for _ in range(50):
        queue.push_job(job(4, "greedy"))
    queue.pop_batch(0.0)
    late = job(1, "modest", arrived=5.0, shape=2)
    queue.push_job(late)
    assert queue.pop_batch(5.0).jobs == [late], "the oldest request decided, so that its client had every turn"


def test_a_large_job_lets_others_in_between() -> None:
    queue = BatchQueue(BATCH, 0.0, 1000)
    large = job(20 * BATCH, "greedy")
    queue.push_job(large)
    assert take_part(queue) == [(large, BATCH)]
    small = job(1, "modest", arrived=1.0)
    queue.push_job(small)
    assert take_part(queue, 1.0) == [(small, 1)]
    assert take_part(queue, 1.0) == [(large, BATCH)]


def test_batches_are_full_with_many_clients() -> None:
    queue = BatchQueue(BATCH, 0.0, 1000)
    for client in ("a", "b", "c", "d", "e"):
        for _ in range(4):
            queue.push_job(job(2, client))
    sizes = []
    while len(queue):
        sizes.append(sum(one.rows for one in queue.pop_batch(0.0).jobs))
    assert sizes == [BATCH] * 5


def test_the_latest_of_the_largest_give_way() -> None:
    queue = BatchQueue(BATCH, 0.0, 16)
    jobs = [job(4, "greedy", arrived=at) for at in range(4)]
    for one in jobs:
        assert queue.push_job(one) == []
    extra = job(4, "greedy", arrived=9.0)
    assert queue.push_job(extra) == [extra], "a client does not push itself out"
    assert queue.push_job(job(4, "modest")) == [jobs[3]]
    assert queue.push_job(job(4, "modest")) == [jobs[2]]
    third = job(4, "modest")
    assert queue.push_job(third) == [third], "both have half of the queue now"
    assert queue.rows == 16


def test_the_queue_is_bounded_in_bytes() -> None:
    queue = BatchQueue(BATCH, 0.0, 1000, max_queue_bytes=100)
    first, second = job(1, "a", nbytes=60), job(1, "a", nbytes=50)
    assert queue.push_job(first) == []
    assert queue.push_job(second) == [second]
    assert queue.push_job(job(1, "a", nbytes=40)) == []
    assert queue.nbytes == 100
    queue.pop_batch(0.0)
    assert queue.nbytes == 0


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


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 3 * BATCH), min_size=1, max_size=6),
    st.lists(st.integers(1, 3 * BATCH), min_size=1, max_size=6),
)
def test_backlogged_clients_get_equal_rows(ours: list[int], theirs: list[int]) -> None:
    queue = BatchQueue(BATCH, 0.0, 1 << 30)
    served = {"a": 0, "b": 0}
    for turn in range(300):
        for client, sizes in (("a", ours), ("b", theirs)):
            queue.push_job(job(sizes[turn % len(sizes)] + 3 * BATCH, client, arrived=float(turn)))
        for one, rows in take_part(queue, float(turn)):
            served[one.client] += rows
        # Start-time fair queueing promises the largest part of each; one that did not fit into a batch, one more.
        assert abs(served["a"] - served["b"]) <= 3 * BATCH


class Model(RuleBasedStateMachine):
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


TestFairness = Model.TestCase
