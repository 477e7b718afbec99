"""Labels of sequences in a cache: records of variable length, and texts that change under their ids."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill.cache import CacheKey, SequenceIds, SoftLabelCache, fingerprints_of, load_labels
from edl.distill.compress import TopK, top_k
from edl.errors import SettingsError, SourceError
from tests.fast.distill.sequences.language_model import sequences

KEY = CacheKey("lm", "1", ("logprobs",), top_k=4)


def named(ids: Any, found: list[np.ndarray]) -> SequenceIds:
    lengths = np.array([len(text) for text in found], np.int64)
    return SequenceIds(list(ids), lengths, fingerprints_of({"ids": np.concatenate(found)}, lengths), ("ids",))


def scores(text: np.ndarray) -> np.ndarray:
    """Labels that tell of which text and token they are."""
    return (np.cumsum(text)[:, None] * np.arange(1, 9) % 97).astype(np.float32)


def labels(found: list[np.ndarray]) -> dict[str, Any]:
    return {"logprobs": top_k(np.concatenate([scores(text) for text in found]), 4)}


def check(outputs: Any, found: list[np.ndarray]) -> None:
    expected = labels(found)["logprobs"]
    assert outputs.ids.tolist() == expected.ids.tolist()
    assert outputs.values.tolist() == expected.values.tolist()


@pytest.fixture(params=["memory", "disk", "reopened"])
def put_and_get(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Keeps sequences, and looks others up: in memory, on disk, or in a cache that is opened anew."""

    def run(kept: SequenceIds, outputs: Any, wanted: SequenceIds, key: CacheKey = KEY, **how: Any) -> Any:
        path = None if request.param == "memory" else tmp_path / "labels"
        with SoftLabelCache(1 << 20 if request.param == "memory" else 0, path, **how) as cache:
            cache.view(key).put(kept, outputs)
            cache.flush()
            if request.param != "reopened":
                return cache.view(key).get(wanted)
        with SoftLabelCache(0, path, **how) as cache:
            return cache.view(key).get(wanted)

    return run


def test_other_text_under_an_id_is_missing(put_and_get: Any, caplog: pytest.LogCaptureFixture) -> None:
    """An edited text of the same length, a longer and a shorter one are not given the old labels."""
    found, ids = sequences(6), [f"text-{at}" if at % 2 == 0 else at for at in range(6)]
    now = [text.copy() for text in found]
    now[1][-1] += 1
    now[2] = np.append(now[2], 5).astype(np.int32)
    now[3] = np.append(now[3], now[3])
    order = [3, 0, 5, 1, 4, 2]
    wanted = named([ids[at] for at in order], [now[at] for at in order])
    got = put_and_get(named(ids, found), labels(found), wanted)
    assert got.mask.tolist() == [False, True, True, False, True, False]
    assert got.row_mask.sum() == sum(len(found[at]) for at in (0, 5, 4))
    check(got.outputs["logprobs"], [found[at] for at in (0, 5, 4)])
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1, "one line, not one for each text"
    assert "sample 3 differs from the text" in warnings[0].getMessage()
    whole = got.filled(labels([now[3], now[1], now[2]]))
    check(whole["logprobs"], [now[at] for at in order])


def test_type_of_token_ids_does_not_matter() -> None:
    """Collators have int64 where files have int32; a value that differs does matter, and own positions do."""
    ids, lengths = np.array([5, 3, 9, 7], np.int32), np.array([3, 1])
    first = fingerprints_of({"ids": ids}, lengths)
    assert fingerprints_of({"ids": ids.astype(np.uint64)}, lengths).tolist() == first.tolist()
    assert fingerprints_of({"ids": ids}, lengths, np.array([0, 1, 2, 0])).tolist() == first.tolist()
    assert fingerprints_of({"ids": ids}, lengths, np.array([0, 1, 0, 0])).tolist() != first.tolist()
    assert fingerprints_of({"ids": ids}, np.array([2, 2])).tolist() != first.tolist()
    assert fingerprints_of({"other": ids}, lengths).tolist() != first.tolist()
    nul = np.array([b"a\0", b"a", b"\0", b""], object)
    assert len(set(fingerprints_of({"x": nul}, np.ones(4, np.int64)).tolist())) == 4, "bytes that end in NUL"


def test_whole_outputs_and_float16(put_and_get: Any) -> None:
    found = sequences(5)
    outputs = {"logprobs": np.concatenate([scores(text) for text in found]), "hidden": np.arange(sum(map(len, found)))}
    key = CacheKey("lm", "1", ("logprobs", "hidden"))
    got = put_and_get(named(range(5), found), outputs, named(range(5), found), key, store_dtype="float16")
    assert got.outputs["logprobs"].dtype == np.float16
    assert got.outputs["logprobs"].tolist() == outputs["logprobs"].tolist()
    assert got.outputs["hidden"].tolist() == outputs["hidden"].tolist()


def test_newest_text_of_an_id_counts(tmp_path: Path) -> None:
    first, second = sequences(3), sequences(3, seed=5)
    for found in (first, second):
        with SoftLabelCache(0, tmp_path) as cache:
            cache.view(KEY).put(named(range(3), found), labels(found))
    with SoftLabelCache(0, tmp_path) as cache:
        view = cache.view(KEY)
        assert view.get(named(range(3), first)).mask.tolist() == [False] * 3
        assert view.contains(named(range(3), first)).tolist() == [False] * 3
        assert view.contains(named(range(3), second)).tolist() == [True] * 3
        assert view.contains(range(4)).tolist() == [True] * 3 + [False]
        check(view.get(named(range(3), second)).outputs["logprobs"], second)
        anyway = view.get(SequenceIds([2, 9, 0]))  # by ids alone, as far as that is known
        assert anyway.mask.tolist() == [True, False, True]
        assert anyway.lengths.tolist() == [len(second[2]), 0, len(second[0])]


def test_rows_and_sequences_do_not_mix(tmp_path: Path) -> None:
    found = sequences(3)
    with SoftLabelCache(0, tmp_path) as cache:
        view = cache.view(KEY)
        view.put(named(range(3), found), labels(found))
        with pytest.raises(SettingsError, match=r"are for sequences with the inputs \['ids'\], but rows are looked up"):
            view.get(range(3))
        with pytest.raises(SettingsError, match="do not match the cache"):
            view.put(range(4), {"logprobs": top_k(np.ones((4, 8), np.float32), 4)})
        with pytest.raises(SettingsError, match=r"with the inputs \['ids'\], but .*'kind'\] are looked up"):
            view.get(SequenceIds([1], np.array([3]), np.array([1], np.uint64), ("ids", "kind")))
    with SoftLabelCache(0, tmp_path / "rows") as cache:
        view = cache.view(KEY)
        view.put(range(4), {"logprobs": top_k(np.ones((4, 8), np.float32), 4)})
        with pytest.raises(SettingsError, match=r"are for rows, but sequences with .* are looked up"):
            view.get(named(range(3), found))
    with pytest.raises(SettingsError, match="labels of rows"):
        load_labels(tmp_path / "rows").of_sequences([1])


# All of a folder


def test_load_labels_of_sequences(tmp_path: Path) -> None:
    found = sequences(20)
    names = [f"t{at:02}" for at in range(20)]
    for part in (slice(0, 12), slice(8, 20)):  # some are there twice
        with SoftLabelCache(0, tmp_path) as cache:
            cache.view(KEY).put(named(names[part], found[part]), labels(found[part]))
    loaded = load_labels(tmp_path)
    assert len(loaded) == 20
    assert isinstance(loaded.outputs["logprobs"], TopK)
    order = [7, 19, 0, 7]
    for at, outputs in zip(order, loaded.of_sequences([names[at] for at in order]), strict=True):
        check(outputs["logprobs"], [found[at]])
    with pytest.raises(SettingsError, match="of_sequences"):
        loaded.rows(names)
    with pytest.raises(SettingsError, match="no label for sample 'x'"):
        loaded.of_sequences(["x"])
    texts_of = {"ids": [found[at].tolist() for at in order]}
    assert len(loaded.of_sequences([names[at] for at in order], texts_of)) == 4
    texts_of["ids"][1][-1] += 1
    with pytest.raises(SettingsError, match="sample 't19' is not the text"):
        loaded.of_sequences([names[at] for at in order], texts_of)
    with pytest.raises(SettingsError, match="'ids' is missing"):
        loaded.of_sequences(["t01"], {"tokens": [[1]]})


def test_load_labels_for_padded_batches(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from tests.fast.distill.sequences.test_padded_batches import collated

    found = sequences(6)
    with SoftLabelCache(0, tmp_path) as cache:
        cache.view(KEY).put(named(range(6), found), labels(found))
    loaded = load_labels(tmp_path)
    chosen = [4, 1, 3]
    made = collated([*(found[at] for at in chosen), np.empty(0, np.int32)], "left")
    batch, mask = made["input_ids"].numpy(), made["attention_mask"].numpy()
    ids = torch.tensor([*chosen, 99])  # the last has no token, and needs no label
    got: Any = loaded.padded(ids, torch.from_numpy(mask), {"ids": torch.from_numpy(batch)})["logprobs"]
    assert got.ids.shape == (*mask.shape, 4)
    check(got.map(lambda array: array[mask == 1]), [found[at] for at in chosen])
    assert not got.values[mask == 0].any()
    tensors = got.map(torch.from_numpy)
    assert tensors.tail_lse.shape == mask.shape
    batch[1][mask[1] == 1] += 1
    with pytest.raises(SettingsError, match="sample 1 is not the text"):
        loaded.padded(ids, mask, {"ids": batch})
    mask[0, mask[0].argmax()] = 0
    with pytest.raises(SettingsError, match=r"sample 4 has .* tokens, but the labelled text has"):
        loaded.padded(ids, mask)
    with pytest.raises(SourceError, match="must be 1 for tokens"):
        loaded.padded(ids, mask * 2)
    with pytest.raises(SourceError, match=r"its mask: cannot be converted to an array.*detach"):
        loaded.padded(ids, torch.from_numpy(mask).float().requires_grad_())
    empty: Any = loaded.padded([1], np.zeros((1, 3)))["logprobs"]
    assert empty.ids.shape == (1, 3, 4)
    assert not empty.ids.any()
