"""The batch queue: bounded, never mixing shapes, and fair between clients, with nothing lost."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from edl_serving.batching.batch_queue import BatchQueue, InferenceJob

FOREVER = float("inf")
BATCH = 8


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
    assert queue.remove_job(last)
    assert not queue.remove_job(last)
    for rows, nbytes in ((7, 60), (6, 61)):
        one = job(rows, nbytes=nbytes)
        assert queue.push_job(one) == [one]
    for rows, nbytes in ((2, 10), (1, 20)):  # of five jobs, of which the last one makes room for that of another client
        queue = BatchQueue(BATCH, 0.0, 10, max_queue_bytes=100)
        jobs = [job(rows, nbytes=nbytes, arrived=float(number)) for number in range(5)]
        for one in jobs:
            assert queue.push_job(one) == []
        jobs.append(job(rows, "b", nbytes=nbytes))
        assert queue.push_job(jobs[-1]) == [jobs.pop(-2)]
        assert queue.clear() == jobs
        assert (queue.clear(), queue.rows, queue.nbytes, len(queue)) == ([], 0, 0, 0)


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
