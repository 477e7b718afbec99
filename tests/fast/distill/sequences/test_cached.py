"""A cache answers texts that teachers answered before, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader
from edl.distill.cache import SoftLabelCache
from edl.errors import NoTeacherError, SettingsError, SourceError
from tests.fast.distill.sequences.corpus import sequences
from tests.fast.distill.sequences.language_model import PrefixModel, check_labels
from tests.fast.distill.sequences.test_padded_batches import UncountedModel, collated
from tests.fast.serving.conftest import Inside

K = 4


@pytest.fixture(scope="module")
def model() -> Iterator[Inside]:
    found = Inside(PrefixModel(), max_batch_rows=512)
    yield found
    found.close()


def read(texts: list[np.ndarray], cache: SoftLabelCache, teacher: str | None, lists: int = 0, **more: Any) -> Any:
    """Read all texts once, and check each label; the statistics afterwards."""
    samples = [(ids, f"text-{number}") for number, ids in enumerate(texts)]
    more = {"top_k": K, "teacher_batch_size": 200} | more
    reader = DistillReader(["ids", None], ["logprobs"], teachers=teacher, cache=cache, id_field=1, **more)
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
        check_labels(ids, labels, more["top_k"])
    return stats


@pytest.mark.parametrize("lists", [0, 7])
def test_second_epoch_asks_for_new_texts(model: Inside, tmp_path: Path, lists: int) -> None:
    """Known, edited and new texts stand in the same requests, and a cache opened anew has them all."""
    texts = sequences(60)
    tokens = sum(map(len, texts))
    with SoftLabelCache(0, tmp_path) as cache:
        assert read(texts, cache, model.target, lists).rows_cached == 0
    now = [text.copy() for text in texts]
    for edited in (3, 4, 31):
        now[edited][-1] += 1
    now[10] = sequences(1, seed=9)[0]  # another length under the same id
    now += sequences(5, seed=7)
    known = tokens - sum(len(texts[at]) for at in (3, 4, 31, 10))
    with SoftLabelCache(0, tmp_path) as cache:
        stats = read(now, cache, model.target, lists)
        assert stats.rows_cached == known
        assert stats.rows_asked == sum(map(len, now)) - known
    with SoftLabelCache(0, tmp_path) as cache:
        assert read(now, cache, None, lists).rows_cached == sum(map(len, now))
        with pytest.raises(NoTeacherError, match="'text-3' is not in the cache, or is that of another text"):
            read(texts, cache, None, lists)


def test_k_is_part_of_what_is_kept(model: Inside, tmp_path: Path) -> None:
    """Labels of another k are asked for, in either direction, and lie beside the others."""
    texts = sequences(8)
    with SoftLabelCache(0, tmp_path) as cache:
        for k in (8, 2, 8, 2):
            read(texts, cache, model.target, top_k=k)
        assert cache.stats().hits == 2 * len(texts)
        with pytest.raises(SettingsError, match="0 sets of labels"):
            read(texts, cache, None, top_k=3)


def test_a_label_holds_no_whole_request(model: Inside) -> None:
    """Who keeps a text of each request, or of each list, does not keep the rest of the answer."""
    texts = sequences(30)
    for lists in (0, 6):
        reader = DistillReader(["ids"], ["logprobs"], teachers=model.target, top_k=K)
        if lists:
            reader.set_sequence_list_generator(
                lambda: ([(ids,) for ids in texts[at : at + 6]] for at in range(0, 30, 6))
            )
        else:
            reader.set_sequence_generator(lambda: ((ids,) for ids in texts))
        with reader:
            for found in reader():
                for ids, labels in found if lists else [found]:
                    for part in (labels.ids, labels.values, labels.tail_lse):
                        assert (part if part.base is None else part.base).nbytes <= part.nbytes
                        assert part.flags.writeable
                    check_labels(ids, labels, K)


def test_kinds_of_teachers_share_a_cache(tmp_path: Path) -> None:
    """A teacher that knows its number of classes, and one that does not, of the same version."""
    texts = sequences(20)
    with SoftLabelCache(0, tmp_path) as cache:
        for count, backend in enumerate((PrefixModel(), UncountedModel()), 1):
            backend.version_if_unnamed = "0123456789abcdef"  # a hash, as the same weights have anywhere
            server = Inside(backend, max_batch_rows=512)
            try:
                assert read(texts[: 10 * count], cache, server.target).rows_cached == sum(
                    map(len, texts[: 10 * count - 10])
                )
            finally:
                server.close()
        assert read(texts, cache, None).rows_cached == sum(map(len, texts))


def test_rows_are_not_taken_from_texts(model: Inside) -> None:
    """Labels of tokens of which only the end is cached would be those of a shorter text: refused by name."""
    text = sequences(1)[0]
    batch = (text, np.arange(len(text), dtype=np.int32), list(range(len(text))))
    with SoftLabelCache() as cache:
        reader = DistillReader(
            ["ids", "position", None], ["logprobs"], teachers=model.target, top_k=K, cache=cache, id_field=2
        )
        with reader.set_batch_generator(lambda: iter([batch])), pytest.raises(SourceError, match="single rows"):
            list(reader())


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_are_cached(model: Inside, tmp_path: Path, side: str) -> None:
    """The same texts padded otherwise, and shuffled, have their labels; as does a text that is one of a reader's."""
    torch = pytest.importorskip("torch")
    from edl.distill.torch import distill

    texts = sequences(24)

    def run(order: list[int], teacher: str | None, cache: SoftLabelCache) -> Any:
        parts = [order[at : at + 5] for at in range(0, len(order), 5)]
        batches = [{**collated([texts[at] for at in part], side), "id": torch.tensor(part)} for part in parts]
        loader = distill(
            batches,
            teacher,
            inputs={"ids": "input_ids"},
            outputs="logprobs",
            tokens="attention_mask",
            top_k=K,
            cache=cache,
            ids="id",
        )
        with loader:
            for batch, labels in loader:
                mask = batch["attention_mask"].bool()
                for row, at in enumerate(batch["id"].tolist()):
                    own = labels.map(lambda array, row=row, mask=mask: array[row][mask[row]].numpy())
                    check_labels(texts[at], own, K)
            return loader.stats()

    with SoftLabelCache(0, tmp_path) as cache:
        assert run(list(range(24)), model.target, cache).rows_cached == 0
    with SoftLabelCache(0, tmp_path) as cache:
        stats = run(list(np.random.default_rng(1).permutation(24)), None, cache)
        assert stats.rows_cached == sum(map(len, texts))
