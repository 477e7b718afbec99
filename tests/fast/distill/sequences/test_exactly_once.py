"""Each token gets the answer of itself, exactly once, while teachers come, leave and are killed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edl.distill import DistillReader, Options, Scorer, Teachers
from edl.errors import SourceError
from edl.testing import LocalTeacher
from edl.testing.models import prefix_scores_of
from edl_serving.backends.callable import CallableBackend
from tests.fast.distill.conftest import Start, until
from tests.fast.distill.sequences.corpus import check, reader_of, sequences, source
from tests.fast.serving.conftest import Inside

BATCH = 4096  # rows; a request of these tests is computed whole


def test_teachers_die_and_join(start: Start, registry_url: str) -> None:
    """One is killed, one leaves in good order, and one comes, in the middle of an epoch."""
    options: dict[str, Any] = {"service": "lm", "discovery": registry_url, "max_batch": BATCH, "delay_s": 0.02}
    teachers = [start("prefix_scores", wait=False, **options) for _ in range(3)]
    for teacher in teachers:
        teacher.wait_ready()
    found = sequences(1500)
    reader = DistillReader(["ids", None], ["logprobs"], teacher_batch_size=200, options=Options(teacher_timeout_s=60))
    reader.set_dynamic_teacher(registry_url, "lm").set_sequence_generator(source(found))
    with reader:
        epoch = reader()
        delivered = list(itertools.islice(epoch, 200))
        until(lambda: reader.stats().teachers_live == 3, 60)
        teachers[0].kill()
        delivered += itertools.islice(epoch, 200)
        joining = start("prefix_scores", **options)
        delivered += itertools.islice(epoch, 200)
        teachers[1].terminate()
        delivered += epoch
        stats = reader.stats()
    assert joining.is_alive()
    check(delivered, found)
    assert stats.rows_delivered == sum(map(len, found)), "rows are tokens"


@pytest.fixture(scope="module")
def teacher() -> Any:
    with LocalTeacher("prefix_scores", max_batch=BATCH, max_queue=4 * BATCH) as teacher:
        yield teacher


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(1, 70), max_size=30), st.one_of(st.none(), st.integers(1, 100)))
def test_any_lengths_and_budgets(teacher: LocalTeacher, lengths: list[int], tokens: int | None) -> None:
    found = [np.arange(length, dtype=np.int32) * 7 + number for number, length in enumerate(lengths)]
    with reader_of(teacher, teacher_batch_size=tokens) as reader:
        reader.set_sequence_generator(source(found))
        check(list(reader()), found)


def test_lists_of_sequences(teacher: LocalTeacher) -> None:
    found = sequences(60)
    lists = [list(enumerate(found))[start : start + 7] for start in range(0, 60, 7)]
    lists.insert(3, [])
    with reader_of(teacher, teacher_batch_size=100) as reader:
        reader.set_sequence_list_generator(lambda: [[(ids, number) for number, ids in part] for part in lists])
        delivered = list(reader())
    assert [len(part) for part in delivered] == [len(part) for part in lists]
    check(itertools.chain.from_iterable(delivered), found)


def test_top_k_has_a_row_a_token(teacher: LocalTeacher) -> None:
    found = sequences(40)
    with reader_of(teacher, top_k=3, teacher_batch_size=90) as reader:
        reader.set_sequence_generator(source(found))
        for ids, _, labels in reader():
            whole = prefix_scores_of(ids)
            assert labels.ids.shape == (len(ids), 3)
            assert labels.values.tolist() == (-np.sort(-whole, axis=1)[:, :3]).tolist()
            assert np.allclose(np.take_along_axis(whole, labels.ids.astype(int), 1), labels.values)


def test_ensembles_agree_on_tokens(teacher: LocalTeacher) -> None:
    found = sequences(30)
    services = [Teachers(endpoints=(teacher.endpoint,))] * 2
    with DistillReader(["ids", None], ["logprobs"], teachers=services, teacher_batch_size=64) as two:
        two.set_sequence_generator(source(found))
        for ids, _, first, second in two():
            assert first.tolist() == second.tolist() == prefix_scores_of(ids).tolist()


def test_a_sequence_beyond_the_teachers(teacher: LocalTeacher) -> None:
    """Those before it arrive; then it is named, with its length, the limit and what to do."""
    with reader_of(teacher) as reader:
        reader.set_sequence_generator(lambda: [(np.arange(5), 0), (np.arange(70_000), 1)])
        epoch = reader()
        with pytest.raises(SourceError, match=r"sample 1 is a sequence of 70000 tokens, .* at most \d+: cut it"):
            list(epoch)


def test_a_server_cuts_between_sequences() -> None:
    """With the defaults of both, a student's request is larger than a server's batch."""
    found = sequences(40)
    with LocalTeacher("prefix_scores") as small, reader_of(small) as reader:
        reader.set_sequence_generator(source(found))
        check(list(reader()), found)


def test_a_model_that_does_not_say_so() -> None:
    """It is not asked: its server would cut a request at any row."""
    backend = CallableBackend(lambda inputs: {"logprobs": inputs["ids"][:, None] * np.float32(1)}, ["ids:int32[]"])
    model = Inside(backend)
    try:
        with Scorer(model.target, top_k=1) as scorer, pytest.raises(SourceError, match=r"model 'm' .*sequence_input"):
            scorer.score([[1, 2]]).result(60)
        reader = DistillReader(["ids", None], ["logprobs"], teachers=model.target)
        with reader.set_sequence_generator(source(sequences(2))), pytest.raises(SourceError, match="sequence_input"):
            list(reader())
        assert model.metric("edl_teacher_requests_total", outcome="ok") == 0
    finally:
        model.close()
