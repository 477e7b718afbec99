"""Sequences through a reader: each token gets the answer of itself, exactly once, from teachers or from a cache."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options, Scorer
from edl.distill.cache import SoftLabelCache
from edl.errors import NoTeacherError, SourceError
from edl_serving.backends.callable import CallableBackend
from tests.fast.distill.conftest import Register, Serve, Served
from tests.fast.distill.sequences.language_model import PrefixModel, check_labels, sequences
from tests.fast.distill.sequences.test_padded_batches import collated

K = 4
WHOLE = {"max_batch_rows": 512}
LONG = np.arange(300, dtype=np.int32) % 31
SHORT = np.arange(20, dtype=np.int32)


def reader_of(teachers: Any, **kwargs: Any) -> DistillReader:
    return DistillReader(["ids", None], ["logprobs"], teachers=getattr(teachers, "endpoint", teachers), **kwargs)


def test_a_model_that_does_not_say_so(serve: Serve) -> None:
    """That its rows belong to sequences: it is not asked, since its server would cut a request at any row."""
    model = serve(CallableBackend(lambda inputs: {"logprobs": inputs["ids"][:, None] * np.float32(1)}, ["ids:int32[]"]))
    with Scorer(model.endpoint, top_k=1) as scorer, pytest.raises(SourceError, match=r"model 'm' .*sequence_input"):
        scorer.score([[1, 2]]).result(90)
    reader = reader_of(model).set_sequence_generator(lambda: ((ids, 0) for ids in sequences(2)))
    with reader, pytest.raises(SourceError, match="sequence_input"):
        list(reader())
    assert model.metric("edl_teacher_requests_total", outcome="ok") == 0


# Texts that only some teachers take wait for those, whichever teacher comes first.


def test_text_that_is_too_long_for_all(serve: Serve) -> None:
    """Those before it arrive. Where all teachers are known it is an error at once, however long they may be away."""
    small, smaller = serve(PrefixModel(max_sequence=100), WHOLE), serve(PrefixModel(max_sequence=50), WHOLE)
    options = Options(teacher_timeout_s=600)
    with reader_of([small.endpoint, smaller.endpoint], top_k=K, options=options) as reader:
        epoch = reader.set_sequence_generator(lambda: iter([(SHORT, 0), (LONG, 1)]))()
        check_labels(SHORT, next(epoch)[2])
        with pytest.raises(SourceError, match=r"sample 1 is a sequence of 300 tokens, .* at most 100: cut it"):
            next(epoch)


def test_service_may_get_a_larger_teacher(serve: Serve, register: Register, url: str) -> None:
    """Of a service whose teachers come and go a larger one may come at any moment; the wait ends with an error."""
    register(serve(PrefixModel(max_sequence=128), WHOLE).endpoint, "lm")

    def long_reader(timeout_s: float) -> DistillReader:
        made = DistillReader(["ids"], ["logprobs"], top_k=K, options=Options(teacher_timeout_s=timeout_s))
        return made.set_dynamic_teacher(url, "lm").set_sequence_generator(lambda: iter([(SHORT,), (LONG,)]))

    with long_reader(1.0) as reader, pytest.raises(SourceError, match="300 tokens, but teachers take at most 128"):
        list(reader())
    with long_reader(60.0) as reader:
        epoch = reader()
        next(epoch)
        register(serve(PrefixModel(), WHOLE).endpoint, "lm")
        ((ids, labels),) = list(epoch)
        check_labels(ids, labels)


@pytest.mark.parametrize("kind", ["sequence", "sequence_list", "routed", "routed_list", "padded", "routed_padded"])
def test_what_comes_before_is_delivered(serve: Serve, kind: str) -> None:
    """A text that waits for a larger teacher holds up no text that came before it, nor the end of the reader."""
    texts = [SHORT[:3], SHORT[:2], LONG[:40]]
    small = serve(PrefixModel(max_sequence=8), WHOLE)
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens: it is being connected to for as long as this takes
        teachers: Any = [small.endpoint, f"127.0.0.1:{unused.getsockname()[1]}"]
        settings: dict[str, Any] = {"top_k": K}
        if kind.startswith("routed"):
            settings |= {"route": 1}
            teachers = {"long": teachers, "short": small.endpoint}
        samples = list(zip(texts, ["short", "long", "long"], strict=True))
        if kind.endswith("padded"):
            pytest.importorskip("torch")
            from edl.distill.torch import distill

            batches = [(text[None], [domain], np.ones((1, len(text)))) for text, domain in samples]
            labelled: Any = distill(batches, teachers, inputs={"ids": 0}, outputs="logprobs", tokens=2, **settings)
            epoch = ((batch[0][0], labels.map(lambda part: part[0].numpy())) for batch, labels in labelled)
        else:
            labelled = reader_of(teachers, **settings)
            if kind.endswith("list"):
                labelled.set_sequence_list_generator(lambda: ([sample] for sample in samples))
                epoch = ((ids, labels) for ((ids, _, labels),) in labelled())
            else:
                labelled.set_sequence_generator(lambda: iter(samples))
                epoch = ((ids, labels) for ids, _, labels in labelled())
        with labelled:
            for text in texts[:2]:
                ids, labels = next(epoch)
                assert ids.tolist() == text.tolist()
                check_labels(ids, labels)


# A cache answers texts that teachers answered before, and no others.


def read(texts: list[np.ndarray], cache: SoftLabelCache, teacher: str | None, lists: int = 0, top_k: int = K) -> Any:
    """Read all texts once, and check each label; the statistics afterwards."""
    samples = [(ids, f"text-{number}") for number, ids in enumerate(texts)]
    reader = reader_of(teacher, cache=cache, id_field=1, top_k=top_k, teacher_batch_size=200)
    if lists:
        reader.set_sequence_list_generator(lambda: (samples[at : at + lists] for at in range(0, len(samples), lists)))
    else:
        reader.set_sequence_generator(lambda: iter(samples))
    with reader:
        found = list(reader())
        stats = reader.stats()
    delivered = [sample for part in found for sample in part] if lists else found
    assert [name for _, name, _ in delivered] == [name for _, name in samples]
    for ids, _, labels in delivered:
        check_labels(ids, labels, top_k)
    return stats


@pytest.mark.parametrize("lists", [0, 7])
def test_second_epoch_asks_for_new_texts(model: Served, tmp_path: Path, lists: int) -> None:
    """Known, edited and new texts stand in the same requests, and a cache opened anew has them all."""
    texts = sequences(60)
    with SoftLabelCache(0, tmp_path) as cache:
        assert read(texts, cache, model.endpoint, lists).rows_cached == 0
    now = [text.copy() for text in texts]
    for edited in (3, 4, 31):
        now[edited][-1] += 1
    now[10] = sequences(1, seed=9)[0]  # another length under the same id
    now += sequences(5, seed=7)
    known = sum(map(len, texts)) - sum(len(texts[at]) for at in (3, 4, 31, 10))
    with SoftLabelCache(0, tmp_path) as cache:
        stats = read(now, cache, model.endpoint, lists)
        assert stats.rows_cached == known
        assert stats.rows_asked == sum(map(len, now)) - known
    with SoftLabelCache(0, tmp_path) as cache:
        assert read(now, cache, None, lists).rows_cached == sum(map(len, now))
        with pytest.raises(NoTeacherError, match="'text-3' is not in the cache, or belongs to another text"):
            read(texts, cache, None, lists)


def test_padded_batches_are_cached(model: Served, tmp_path: Path) -> None:
    """The same texts padded otherwise, and shuffled, have their labels."""
    torch = pytest.importorskip("torch")
    from edl.distill.torch import distill
    from tests.fast.distill.sequences.language_model import check_batch

    texts = sequences(24)

    def run(order: list[int], side: str, teacher: str | None, cache: SoftLabelCache) -> Any:
        parts = [order[at : at + 5] for at in range(0, len(order), 5)]
        batches = [{**collated([texts[at] for at in part], side), "id": torch.tensor(part)} for part in parts]
        asked: Any = {"inputs": {"ids": "input_ids"}, "outputs": "logprobs", "tokens": "attention_mask", "top_k": K}
        with distill(batches, teacher, cache=cache, ids="id", **asked) as loader:
            for batch, labels in loader:
                check_batch(batch["input_ids"], batch["attention_mask"], labels)
            return loader.stats()

    with SoftLabelCache(0, tmp_path) as cache:
        assert run(list(range(24)), "left", model.endpoint, cache).rows_cached == 0
    with SoftLabelCache(0, tmp_path) as cache:
        stats = run(list(np.random.default_rng(1).permutation(24)), "right", None, cache)
        assert stats.rows_cached == sum(map(len, texts))
