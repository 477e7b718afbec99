"""A scorer's labels are those of the sequences asked for, from teachers that come and go."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options, Scorer, Teachers, on_policy
from edl.errors import ClosedError, NoTeacherError, SettingsError, SourceError
from edl.testing.models import prefix_scores_of
from tests.fast.distill.conftest import Start, until
from tests.fast.distill.sequences.corpus import sequences
from tests.fast.distill.sequences.language_model import VOCABULARY, NegativeModel, PrefixModel, check_labels
from tests.fast.serving.conftest import Inside

WAIT_S = 60.0


@pytest.fixture(scope="module")
def model() -> Iterator[Inside]:
    found = Inside(PrefixModel(max_sequence=200), max_batch_rows=512)
    yield found
    found.close()


def test_labels_are_the_sequences_own(model: Inside) -> None:
    found = sequences(90)
    with Scorer(model.target, top_k=5, request_tokens=100, max_tokens=300, tokenizer="sha256:ab") as scorer:
        futures = [scorer.score(found[start : start + 10]) for start in range(0, 90, 10)]
        for start, future in zip(range(0, 90, 10), futures, strict=True):
            for ids, labels in zip(found[start : start + 10], future.result(WAIT_S), strict=True):
                check_labels(ids, labels, 5)
        assert scorer.stats().rows_delivered == sum(map(len, found))


def test_targets_are_scored_beside(model: Inside) -> None:
    found = sequences(20)
    targets = [np.random.default_rng(len(ids)).integers(0, VOCABULARY, (len(ids), 3)) for ids in found]
    with Scorer(model.target, top_k=4, targets=True) as scorer:
        with pytest.raises(SettingsError, match="targets=True"):
            scorer.score(found)
        for ids, wanted, (labels, logprobs) in zip(
            found, targets, scorer.score(found, targets=targets).result(WAIT_S), strict=True
        ):
            check_labels(ids, labels, 4)
            assert logprobs.tolist() == np.take_along_axis(prefix_scores_of(ids, VOCABULARY), wanted, 1).tolist()


def test_float16_is_for_the_top_k_alone(model: Inside) -> None:
    ids, targets = sequences(1)[0], np.arange(3)
    with Scorer(model.target, top_k=4, targets=True, dtype="float16") as scorer:
        ((labels, logprobs),) = scorer.score([ids], targets=[np.tile(targets, (len(ids), 1))]).result(WAIT_S)
    assert (labels.values.dtype, logprobs.dtype) == (np.float16, np.float32)
    assert logprobs.tolist() == prefix_scores_of(ids, VOCABULARY)[:, :3].tolist()


def test_a_reader_may_ask_for_targets(model: Inside) -> None:
    found = [(ids, np.zeros((len(ids), 1), np.int64)) for ids in sequences(10)]
    with DistillReader(["ids", "targets"], ["target_logprobs", "logprobs"], teachers=model.target, top_k=2) as reader:
        reader.set_sequence_generator(lambda: found)
        for ids, _, logprobs, labels in reader():
            assert logprobs[:, 0].tolist() == prefix_scores_of(ids, VOCABULARY)[:, 0].tolist()
            check_labels(ids, labels, 2)


def test_arrays_may_be_used_again(model: Inside) -> None:
    ids = np.arange(30)
    with Scorer(model.target, top_k=3) as scorer:
        future = scorer.score([ids])
        ids[:] = 0
        check_labels(np.arange(30), future.result(WAIT_S)[0], 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 9}, "top_k=9 is asked for: set top_k=8 or less"),
        ({"tokenizer": "sha256:cd"}, "has tokenizer 'sha256:ab', and the student's is 'sha256:cd'"),
    ],
)
def test_a_teacher_that_does_not_fit(model: Inside, options: dict[str, Any], words: str) -> None:
    """It is set aside with the reason, and the call waits for another until `teacher_timeout_s` has passed."""
    with Scorer(model.target, **{"top_k": 3, **options}) as scorer:
        future = scorer.score([[1, 2]])
        until(lambda: any(words in teacher.why for teacher in scorer.stats().teachers.values()), WAIT_S)
        assert not future.done()
    with pytest.raises(ClosedError):
        future.result(WAIT_S)
    with Scorer("127.0.0.1:1", options=Options(teacher_timeout_s=0.2)) as scorer, pytest.raises(NoTeacherError):
        scorer.score([[1, 2]]).result(WAIT_S)


def test_too_long_a_sequence_fails_alone(model: Inside) -> None:
    with Scorer(model.target, top_k=3) as scorer:
        long, short = scorer.score([np.arange(201)]), scorer.score([np.arange(200)])
        with pytest.raises(SourceError, match="sample 0 is a sequence of 201 tokens, and teachers take at most 200"):
            long.result(WAIT_S)
        check_labels(np.arange(200), short.result(WAIT_S)[0], 3)
        with pytest.raises(SourceError, match="sequence 1, ids"):
            scorer.score([[1], [object()]])


def test_a_scorer_outlives_its_last_name(model: Inside) -> None:
    """A call under way keeps its scorer; afterwards nothing does, and its thread ends."""
    before = set(threading.enumerate())
    scorer = Scorer(model.target, top_k=3)
    (thread,) = [found for found in threading.enumerate() if found.name == "edl-score" and found not in before]
    gone = weakref.ref(scorer)
    future = scorer.score([[1, 2]])
    del scorer
    check_labels([1, 2], future.result(WAIT_S)[0], 3)
    del future
    until(lambda: gc.collect() >= 0 and gone() is None, WAIT_S)
    until(lambda: not thread.is_alive(), WAIT_S)


def test_an_error_keeps_no_scorer(model: Inside) -> None:
    """A future that is kept has an error with its traceback, and nothing in that has the scorer."""
    scorer = Scorer(model.target, top_k=3)
    gone = weakref.ref(scorer)
    future = scorer.score([[]])
    assert isinstance(future.exception(WAIT_S), SourceError)
    del scorer
    until(lambda: gone() is None, WAIT_S)


def test_a_closed_scorer_says_so(model: Inside) -> None:
    scorer = Scorer(model.target, top_k=3)
    scorer.score([[1]]).result(WAIT_S)
    scorer.close()
    scorer.close()
    with pytest.raises(ClosedError):
        scorer.score([[1]])


def test_teachers_die_between_calls(start: Start, registry_url: str) -> None:
    options: dict[str, Any] = {"service": "lm", "discovery": registry_url, "max_batch": 4096, "delay_s": 0.01}
    teachers = [start("prefix_scores", wait=False, vocabulary=VOCABULARY, **options) for _ in range(2)]
    found = sequences(300)
    with Scorer("lm", top_k=4, discovery=registry_url, request_tokens=200) as scorer:
        futures = [scorer.score(found[start : start + 20]) for start in range(0, 300, 20)]
        futures[2].result(WAIT_S)
        for teacher in teachers:
            teacher.wait_ready()
        teachers[0].kill()
        futures += [scorer.score(found)]
        labels = [label for future in futures for label in future.result(WAIT_S)]
    for ids, label in zip(found * 2, labels, strict=True):
        check_labels(ids, label, 4)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_the_loop_is_so_far_ahead(model: Inside, ahead: int) -> None:
    generated = []

    def generate(batch: int) -> list[list[int]]:
        generated.append(batch)
        return [[batch, batch + 1, 5], [batch]]

    with Scorer(model.target, top_k=3) as scorer:
        for number, (batch, texts, labels) in enumerate(on_policy(range(6), generate, scorer, ahead=ahead)):
            assert batch == number
            assert generated == list(range(min(number + ahead + 1, 6)))
            for ids, label in zip(texts, labels, strict=True):
                check_labels(ids, label, 3)
        with pytest.raises(SettingsError, match="ahead=-1"):
            next(on_policy(range(6), generate, scorer, ahead=-1))
        loop = on_policy(range(6), generate, scorer, ahead=2)
        next(loop)
        loop.close()


def test_sampled_tokens_are_targets(model: Inside) -> None:
    """A scorer with targets is asked for the tokens that follow, as a loss on sampled tokens wants them."""
    found = [np.array([5, 3, 9]), [7], np.array([2, 2])]
    with Scorer(model.target, top_k=3, targets=True) as scorer:
        ((_, texts, labels),) = on_policy([found], lambda batch: batch, scorer, timeout_s=WAIT_S)
        assert texts is found
        for ids, (label, logprobs) in zip(found, labels, strict=True):
            tokens = np.asarray(ids)
            check_labels(tokens, label, 3)
            whole = prefix_scores_of(tokens, VOCABULARY)
            assert logprobs[:-1, 0].tolist() == whole[np.arange(len(tokens) - 1), tokens[1:]].tolist()
            assert logprobs.shape == (len(tokens), 1)
        with pytest.raises(SourceError):
            next(on_policy([[5]], lambda batch: batch, scorer))


def test_a_batch_may_generate_nothing(model: Inside) -> None:
    with Scorer(model.target, top_k=3) as scorer:
        loop = on_policy([[1, 2], [], [3]], lambda batch: [[token] for token in batch], scorer, timeout_s=WAIT_S)
        assert [len(labels) for _, _, labels in loop] == [2, 0, 1]
        assert scorer.score([]).result(WAIT_S) == []


@pytest.fixture(scope="module")
def negative() -> Iterator[Inside]:
    found = Inside(NegativeModel(), max_batch_rows=512)
    yield found
    found.close()


def check_domain(ids: Any, domain: str, labels: Any) -> None:
    if domain == "math":
        check_labels(ids, labels, 4)
    else:
        smallest = np.sort(prefix_scores_of(ids, VOCABULARY), axis=1)[:, :4]
        assert labels.values.tolist() == (-smallest).tolist()


def test_domains_have_their_own_teachers(model: Inside, negative: Inside) -> None:
    """Sequences of a call come back in order, each with the labels, and targets, of its domain's teachers."""
    found = sequences(90)
    domains = np.random.default_rng(0).choice(["math", "law", "code"], 90)
    there = {"math": model.target, None: negative.target}
    with Scorer(there, top_k=4, targets=True, request_tokens=100, max_tokens=300) as scorer:
        targets = [np.zeros((len(ids), 1), np.int32) for ids in found]
        futures = [
            scorer.score(found[at : at + 9], targets=targets[at : at + 9], route=domains[at : at + 9])
            for at in range(0, 90, 9)
        ]
        delivered = [labels for future in futures for labels in future.result(WAIT_S)]
        for ids, domain, (labels, own) in zip(found, domains, delivered, strict=True):
            check_domain(ids, domain, labels)
            assert (
                own[:, 0].tolist()
                == (prefix_scores_of(ids, VOCABULARY)[:, 0] * (1 if domain == "math" else -1)).tolist()
            )
        ((labels, _),) = scorer.score([found[0]], targets=[targets[0]], route="math").result(WAIT_S)
        check_domain(found[0], "math", labels)
        routes = scorer.stats().routes
        assert routes["math"].rows_received == sum(
            len(ids) for ids, domain in zip([*found, found[0]], [*domains, "math"], strict=True) if domain == "math"
        )
        assert routes[None].rows_received == scorer.stats().rows_received - routes["math"].rows_received


def test_domain_without_teachers(model: Inside, registry_url: str) -> None:
    """Nor does a text that waits for a teacher of its domain that takes it."""
    there = {"math": model.target, "code": Teachers(service="nobody", discovery=registry_url)}
    with Scorer(there, top_k=4, options=Options(teacher_timeout_s=5)) as scorer:
        lost, mixed = scorer.score([[1, 2]], route="code"), scorer.score([[3], [4]], route=["math", "code"])
        for _ in range(3):
            check_labels([1, 2, 3], scorer.score([[1, 2, 3]], route="math").result(WAIT_S)[0], 4)
        for future in (lost, mixed):
            with pytest.raises(NoTeacherError, match="nobody"):
                future.result(WAIT_S)


def test_domains_of_a_call_are_checked(model: Inside) -> None:
    with Scorer({"math": model.target}, top_k=4) as scorer:
        for route, words in ((None, "has route None"), ("law", "has route 'law'"), (["math"], "1 values .* 2 rows")):
            with pytest.raises(SourceError, match=words):
                scorer.score([[1], [2]], route=route)
    with Scorer(model.target, top_k=4) as scorer, pytest.raises(SettingsError, match="has one service"):
        scorer.score([[1]], route="math")


def test_on_policy_by_domain(model: Inside, negative: Inside) -> None:
    batches = [{"prompts": [[3], [4, 5]], "domain": ["code", "math"]}, {"prompts": [[6]], "domain": "code"}]
    with Scorer({"math": model.target, "code": negative.target}, top_k=4) as scorer:
        loop = on_policy(batches, lambda batch: [[*ids, 1] for ids in batch["prompts"]], scorer, route="domain")
        for batch, texts, labels in loop:
            domains = ["code"] if batch["domain"] == "code" else batch["domain"]
            for ids, domain, label in zip(texts, domains, labels, strict=True):
                check_domain(ids, domain, label)
