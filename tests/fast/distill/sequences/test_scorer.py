"""A scorer's labels are those of the sequences asked for, from teachers that come and go."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from edl.distill import Options, Policy, Scorer, Teachers, on_policy
from edl.distill.pipeline.chunk_labeller import ChunkLabeller
from edl.distill.source.chunk import Chunk
from edl.errors import BadOutputError, ClosedError, NoTeacherError, SettingsError, SourceError, TemporaryError
from edl.testing.models import prefix_scores_of
from tests.fast.distill.conftest import Register, Serve, Served
from tests.fast.distill.sequences.language_model import VOCABULARY, PrefixModel, check_labels, sequences
from tests.waiting import DEADLINE_S, wait_until


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_targets_are_scored_beside(model: Served, dtype: str | None) -> None:
    """A dtype is for the top-k labels alone."""
    found = sequences(20)
    targets = [np.random.default_rng(len(ids)).integers(0, VOCABULARY, (len(ids), 3)) for ids in found]
    with Scorer(model.endpoint, top_k=4, targets=True, dtype=dtype) as scorer:
        with pytest.raises(SettingsError, match="targets=True"):
            scorer.score(found)
        assert scorer.score([], targets=[]).result(DEADLINE_S) == []
        given = [ids.copy() for ids in found]
        future = scorer.score(given, targets=targets)
        for ids in given:
            ids[:] = 0  # an array may be used again
        answers = future.result(DEADLINE_S)
    for ids, wanted, (labels, logprobs) in zip(found, targets, answers, strict=True):
        assert (labels.values.dtype, logprobs.dtype) == (np.dtype(dtype or "float32"), np.float32)
        if dtype is None:
            check_labels(ids, labels)
        assert logprobs.tolist() == np.take_along_axis(prefix_scores_of(ids, VOCABULARY), wanted, 1).tolist()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 9}, "top_k=9 is requested: set top_k=8 or less"),
        ({"tokenizer": "sha256:cd"}, "has tokenizer 'sha256:ab', but the student's is 'sha256:cd'"),
    ],
)
def test_a_teacher_that_does_not_fit(model: Served, options: dict[str, Any], words: str) -> None:
    """The call fails at once, since no other teacher is named; one that is away is waited for."""
    with Scorer(model.endpoint, **{"top_k": 3, **options}) as scorer, pytest.raises(SettingsError, match=words):
        scorer.score([[1, 2]]).result(DEADLINE_S)
    with Scorer("127.0.0.1:1", options=Options(teacher_timeout_s=0.2)) as scorer, pytest.raises(NoTeacherError):
        scorer.score([[1, 2]]).result(DEADLINE_S)


def test_a_scorer_outlives_its_last_name(model: Served) -> None:
    """A call under way keeps its scorer; afterwards nothing does, not even an error that is kept; its thread ends."""
    before = set(threading.enumerate())
    scorer = Scorer(model.endpoint, top_k=4)
    (thread,) = [found for found in threading.enumerate() if found.name == "edl-score" and found not in before]
    gone = weakref.ref(scorer)
    failed, future = scorer.score([[]]), scorer.score([[1, 2]])
    del scorer
    check_labels([1, 2], future.result(DEADLINE_S)[0])
    assert isinstance(failed.exception(DEADLINE_S), SourceError)
    del future
    wait_until(lambda: gc.collect() >= 0 and gone() is None)
    wait_until(lambda: not thread.is_alive())


@pytest.mark.parametrize("mixed", ["refuse", "warn"])
def test_scorer_follows_a_new_version(serve: Serve, mixed: Any) -> None:
    """On-policy loops change weights: calls after a restart are of the new version, and none waits in vain."""
    port = 0
    for version in ("1", "2", "3"):
        served = serve("prefix_scores", {"port": port}, vocabulary=VOCABULARY, version=version)
        if not port:
            port = served.port
            scorer = Scorer(served.endpoint, top_k=4, options=Options(mixed_versions=mixed))
        for _ in range(2):
            check_labels([1, 2, 3], scorer.score([[1, 2, 3]]).result(DEADLINE_S)[0])
        served.close()
    scorer.close()


# Calls end, each with its own labels or its own error, whatever becomes of the others.


class HeldModel(PrefixModel):
    """Holds each answer until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def predict_top_k(self, inputs: Any, k: int, temperature: float) -> Any:
        assert self.go.wait(DEADLINE_S)
        return super().predict_top_k(inputs, k, temperature)


@pytest.fixture
def held(serve: Serve, stack: ExitStack) -> tuple[HeldModel, str]:
    """A model that holds its answers, and its teacher's endpoint."""
    model = HeldModel()
    endpoint = serve(model, {"max_batch_rows": 512}).endpoint
    stack.callback(model.go.set)
    return model, endpoint


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each request that a scorer has begun to send."""
    rows: list[int] = []
    submit = ChunkLabeller.submit

    def noting(labeller: ChunkLabeller, chunk: Chunk, *rest: Any) -> int:
        rows.append(chunk.rows)
        return submit(labeller, chunk, *rest)

    monkeypatch.setattr(ChunkLabeller, "submit", noting)
    return rows


def text(length: int) -> np.ndarray:
    return np.arange(length) + 100 * length


def test_tokens_under_way_are_bounded(held: tuple[HeldModel, str], sent: list[int]) -> None:
    """Beyond `max_tokens` goes what is larger alone, and nothing beside it; a call that is cancelled makes room."""
    model, endpoint = held
    with Scorer(endpoint, top_k=4, request_tokens=10, max_tokens=20) as scorer:
        first, second, third = scorer.score([text(15)]), scorer.score([text(9), text(9)]), scorer.score([text(30)])
        wait_until(lambda: sent == [15])
        assert first.cancel()
        wait_until(lambda: sent == [15, 9, 9])
        assert scorer._calls.tokens == 18
        model.go.set()
        for future, lengths in ((second, (9, 9)), (third, (30,))):
            for length, labels in zip(lengths, future.result(DEADLINE_S), strict=True):
                check_labels(text(length), labels)
        wait_until(lambda: scorer._calls.tokens == 0)


def test_an_error_is_of_its_call_alone(model: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(policy=Policy(task_failures=1, failures_to_open=100))
    with Scorer(model.endpoint, top_k=4, targets=True, options=options) as scorer:
        bad = scorer.score([[1, 2]], targets=[[[0], [VOCABULARY]]])
        good = scorer.score([[3, 4]], targets=[[[0], [1]]])
        with pytest.raises(BadOutputError, match="out of bounds"):
            bad.result(DEADLINE_S)
        check_labels([3, 4], good.result(DEADLINE_S)[0][0])
        with pytest.raises(SourceError, match="sample 1 is a sequence of 201 tokens"):
            scorer.score([[1], text(201)], targets=[[[0]], [[0]] * 201]).result(DEADLINE_S)

        def failing(*_: Any) -> int:
            raise RuntimeError("a bug")

        monkeypatch.setattr(ChunkLabeller, "submit", failing)
        with pytest.raises(RuntimeError, match="a bug"):
            scorer.score([[1]], targets=[[[0]]]).result(DEADLINE_S)
        wait_until(lambda: scorer._calls.tokens == 0)


def test_a_deadline_ends_a_call(held: tuple[HeldModel, str]) -> None:
    model, endpoint = held
    with Scorer(endpoint, top_k=4) as scorer:
        late, other = scorer.score([[1, 2]], timeout_s=0.05), scorer.score([[3]])
        with pytest.raises(TemporaryError, match=r"not all sequences were scored within 0\.05 s"):
            late.result(DEADLINE_S)
        model.go.set()
        check_labels([3], other.result(DEADLINE_S)[0])


def test_close_ends_all_calls(held: tuple[HeldModel, str], sent: list[int]) -> None:
    scorer = Scorer(held[1], top_k=4, max_tokens=20)
    futures = [scorer.score([text(15)]), scorer.score([text(15)])]
    wait_until(lambda: sent == [15])
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: scorer.close(), range(4))) == [None] * 4
    for future in futures:
        with pytest.raises(ClosedError):
            future.result(DEADLINE_S)


def test_long_call_holds_up_no_other(serve: Serve, register: Register, url: str) -> None:
    """A call that waits for a teacher of long texts goes when it is there; those behind it need not wait."""
    register(serve(PrefixModel(max_sequence=8)).endpoint, "lm")
    with Scorer("lm", discovery=url, top_k=4) as scorer:
        long, short = scorer.score([text(40)]), scorer.score([text(3)])
        check_labels(text(3), short.result(DEADLINE_S)[0])
        assert not long.done()
        register(serve(PrefixModel()).endpoint, "lm")
        check_labels(text(40), long.result(DEADLINE_S)[0])


def test_versions_are_followed_between_calls(
    held: tuple[HeldModel, str], sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the middle of calls, whose labels would be of two versions."""
    followed: list[int] = []
    monkeypatch.setattr("edl.distill.scoring._FOLLOW_S", 0.001)
    monkeypatch.setattr(ChunkLabeller, "follow_version", lambda _, service: followed.append(service))
    model, endpoint = held
    with Scorer(endpoint, top_k=4) as scorer:
        first = scorer.score([[1]])
        wait_until(lambda: sent == [1])
        before = len(followed)
        second = scorer.score([[1, 2]])
        wait_until(lambda: sent == [1, 2])
        assert len(followed) == before > 0
        model.go.set()
        for future in (first, second):
            future.result(DEADLINE_S)
        scorer.score([[3]]).result(DEADLINE_S)
        assert len(followed) > before


# Loops in which the student generates what is scored.


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_the_loop_is_so_far_ahead(model: Served, ahead: int) -> None:
    generated = []

    def generate(batch: int) -> list[list[int]]:
        generated.append(batch)
        return [[batch, batch + 1, 5], [batch]]

    with Scorer(model.endpoint, top_k=4) as scorer:
        for number, (batch, texts, labels) in enumerate(on_policy(range(6), generate, scorer, ahead=ahead)):
            assert batch == number
            assert generated == list(range(min(number + ahead + 1, 6)))
            for ids, label in zip(texts, labels, strict=True):
                check_labels(ids, label)
        with pytest.raises(SettingsError, match="ahead=-1"):
            next(on_policy(range(6), generate, scorer, ahead=-1))
        loop = on_policy(range(6), generate, scorer, ahead=2)
        next(loop)
        loop.close()
        loop = on_policy([[1, 2], [], [3]], lambda batch: [[token] for token in batch], scorer, timeout_s=DEADLINE_S)
        assert [len(labels) for _, _, labels in loop] == [2, 0, 1], "a batch may generate nothing"
        loop = on_policy([["a", "b"]], lambda batch: [[1]], scorer)
        with pytest.raises(SourceError, match="returned 1 sequences for batch 0, which has 2"):
            next(loop)
        prompts = [[0]]
        loop = on_policy((prompts.__setitem__(0, [at]) or prompts for at in (1, 2)), list, scorer)
        with pytest.raises(SourceError, match="sequences of batch 0 changed"):
            next(loop)


def test_sampled_tokens_are_targets(model: Served) -> None:
    """A scorer with targets is asked for the tokens that follow, as a loss on sampled tokens wants them."""
    found = [np.array([5, 3, 9]), [7], np.array([2, 2])]
    with Scorer(model.endpoint, top_k=4, targets=True) as scorer:
        ((_, texts, labels),) = on_policy([found], lambda batch: batch, scorer, timeout_s=DEADLINE_S)
        assert texts is found
        for ids, (label, logprobs) in zip(found, labels, strict=True):
            tokens = np.asarray(ids)
            check_labels(tokens, label)
            whole = prefix_scores_of(tokens, VOCABULARY)
            assert logprobs[:-1, 0].tolist() == whole[np.arange(len(tokens) - 1), tokens[1:]].tolist()
            assert logprobs.shape == (len(tokens), 1)
        with pytest.raises(SourceError):
            next(on_policy([[5]], lambda batch: batch, scorer))


# Sequences of several domains.

SIGN = {"math": 1, "law": -1, "code": -1}


def test_domains_have_their_own_teachers(model: Served, negative: Served) -> None:
    found = sequences(90)
    domains = np.random.default_rng(0).choice(["math", "law", "code"], 90)
    targets = [np.zeros((len(ids), 1), np.int32) for ids in found]
    there = {"math": model.endpoint, None: negative.endpoint}
    with Scorer(there, top_k=4, targets=True, request_tokens=100, max_tokens=300) as scorer:
        parts = [slice(at, at + 9) for at in range(0, 90, 9)]
        futures = [scorer.score(found[part], targets=targets[part], route=domains[part]) for part in parts]
        delivered = [labels for future in futures for labels in future.result(DEADLINE_S)]
        for ids, domain, (labels, own) in zip(found, domains, delivered, strict=True):
            check_labels(ids, labels, sign=SIGN[domain])
            assert own[:, 0].tolist() == (SIGN[domain] * prefix_scores_of(ids, VOCABULARY)[:, 0]).tolist()
        ((labels, _),) = scorer.score([found[0]], targets=[targets[0]], route="math").result(DEADLINE_S)
        check_labels(found[0], labels)
        routes = scorer.stats().routes
        of_math = sum(len(ids) for ids, domain in zip(found, domains, strict=True) if domain == "math")
        assert routes["math"].rows_received == of_math + len(found[0])
        assert routes[None].rows_received == sum(map(len, found)) - of_math


def test_domain_without_teachers(model: Served, url: str) -> None:
    """Its calls fail in time, and hold up no call of another domain."""
    there = {"math": model.endpoint, "code": Teachers(service="nobody", discovery=url)}
    with Scorer(there, top_k=4, options=Options(teacher_timeout_s=1)) as scorer:
        lost, mixed = scorer.score([[1, 2]], route="code"), scorer.score([[3], [4]], route=["math", "code"])
        for _ in range(3):
            check_labels([1, 2, 3], scorer.score([[1, 2, 3]], route="math").result(DEADLINE_S)[0])
        for future in (lost, mixed):
            with pytest.raises(NoTeacherError, match="nobody"):
                future.result(DEADLINE_S)
        for route, words in ((None, "has route None"), ("law", "has route 'law'"), (["math"], "1 values .* 2 rows")):
            with pytest.raises(SourceError, match=words):
                scorer.score([[1], [2]], route=route)
    with Scorer(model.endpoint, top_k=4) as scorer, pytest.raises(SettingsError, match="has one service"):
        scorer.score([[1]], route="math")
