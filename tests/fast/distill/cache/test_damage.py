"""Files that are torn, damaged or foreign: what is read is right, or not there, and that is said; whole folders."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edl.distill.cache import CacheKey, SoftLabelCache, load_labels
from edl.errors import SettingsError
from tests.fast.distill.cache.conftest import KEY, OTHER, found, put, rows, segments
from tests.fast.distill.cache.test_sequences import labels, named
from tests.fast.distill.sequences.language_model import sequences

LM = CacheKey("lm", "1", ("logprobs",), top_k=4)
NAME = "00000000000000000001-1-aa.safetensors"
EXAMPLES = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.mark.parametrize("length", [0, 8, 0.5, -1])
def test_a_torn_file_is_skipped_and_named(tmp_path: Path, warnings_of: Callable[[], list[str]], length: float) -> None:
    put(tmp_path, range(50))
    torn = put(tmp_path, range(50, 100))[-1]
    size = torn.stat().st_size
    os.truncate(torn, int(size * length) if 0 < length < 1 else int(length) % size)
    assert found(tmp_path, [0, 49, 50, 99]) == [True, True, False, False]
    (warning,) = warnings_of()
    assert str(torn) in warning
    assert "torn" in warning
    put(tmp_path, range(50, 100))
    assert found(tmp_path, [0, 49, 50, 99]) == [True] * 4


def test_foreign_files_are_skipped_and_named(tmp_path: Path, warnings_of: Callable[[], list[str]]) -> None:
    (ours,) = put(tmp_path, range(10))
    (others,) = put(tmp_path, range(10, 20), OTHER)
    place = ours.parent
    shutil.copy(others, place / others.name)
    safetensors.numpy.save_file({"logits": np.zeros((5, 100), np.float32)}, place / "weights.safetensors")
    (place / "notes.txt").write_text("mine")
    with SoftLabelCache(0, tmp_path) as cache:
        assert cache.view(KEY).get([0, 10]).mask.tolist() == [True, False]
        cache.view(KEY).disk.scan(force=True)  # type: ignore[union-attr]  # warns once only
        assert cache.stats().skipped_files == 3
    warned = warnings_of()
    assert len(warned) == 3
    for words in (others.name, "weights.safetensors", "notes.txt", "belongs to"):
        assert any(words in warning for warning in warned)
    put(tmp_path, range(500, 560), disk_bytes=64 << 10)
    assert (place / "notes.txt").exists()
    assert (place / "weights.safetensors").exists()


@EXAMPLES
@given(data=st.data(), of_texts=st.booleans())
def test_damage_gives_no_wrong_label(tmp_path: Path, data: st.DataObject, of_texts: bool) -> None:
    """Whichever bytes of a file are changed or cut off, a label that is still found is the sample's own."""
    shutil.rmtree(tmp_path, ignore_errors=True)
    found_texts = sequences(6, longest=5)
    key, ids = (LM, named(range(6), found_texts)) if of_texts else (KEY, ["a", "bc", "größe"])
    with SoftLabelCache(0, tmp_path) as cache:
        cache.view(key).put(ids, labels(found_texts) if of_texts else rows([1, 2, 3], 4))
    with SoftLabelCache(1 << 20, tmp_path) as cache:
        whole: Any = cache.view(key).get(ids)
    (file,) = segments(tmp_path, key)
    damaged = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(damaged[: data.draw(st.sampled_from([None, None, len(damaged) // 2, len(damaged) - 1]))])
    with SoftLabelCache(0, tmp_path) as cache:
        got: Any = cache.view(key).get(ids)
    if got.mask.any():
        for name, expected in whole.outputs.items():
            if of_texts:
                assert got.outputs[name].values.tolist() == expected.values[got.row_mask].tolist()
                assert got.outputs[name].ids.tolist() == expected.ids[got.row_mask].tolist()
            else:
                np.testing.assert_array_equal(got.outputs[name], expected[got.mask])


def flip(file: Path, tensor: str, offset: int = 0) -> None:
    """Flip a bit of a tensor."""
    data = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    begin: int = json.loads(data[8 : 8 + length])[tensor]["data_offsets"][0]
    data[8 + length + begin + offset] ^= 0x40
    file.write_bytes(data)


def test_verifying_finds_unread_damage(tmp_path: Path) -> None:
    (file,) = put(tmp_path, range(200))
    flip(file, "logits", 150 * 400)
    with SoftLabelCache(0, tmp_path) as cache:
        view = cache.view(KEY)
        assert view.contains([150])[0]
        view.verify()
        assert np.flatnonzero(~view.contains(range(200))).tolist() == [150]
    assert set(range(200)) - set(load_labels(tmp_path).ids) == {150}
    put(tmp_path, [150])
    assert load_labels(tmp_path).ids == tuple(range(200))


def test_files_without_checksums_are_read(tmp_path: Path, warnings_of: Callable[[], list[str]]) -> None:
    """As the first release wrote them."""
    (file,) = put(tmp_path, range(10))
    tensors = safetensors.numpy.load_file(file)
    del tensors["sample_ids.crc32"]
    metadata = {"format": "edl-soft-labels/1", "namespace": KEY.folder, "top_k": "{}"}
    file.write_bytes(safetensors.numpy.save(tensors, metadata))
    assert found(tmp_path, range(10)) == [True] * 10
    assert warnings_of() == []


@EXAMPLES
@given(text=st.binary(max_size=100) | st.sampled_from([b"[" * 100_000, b"{}", b"[]"]), rest=st.binary(max_size=100))
def test_any_bytes_are_no_label(tmp_path: Path, text: bytes, rest: bytes) -> None:
    put(tmp_path, [7])
    (tmp_path / KEY.folder / NAME).write_bytes(struct.pack("<Q", len(text)) + text + rest)
    assert found(tmp_path, [0, 1, 7]) == [False, False, True]
    (tmp_path / KEY.folder / "key.json").write_bytes(text)
    with SoftLabelCache(0, tmp_path) as cache:
        assert cache.keys() == []


def test_a_damaged_key_is_written_anew(tmp_path: Path) -> None:
    put(tmp_path, [7])
    put(tmp_path / "other", [7], OTHER)
    shutil.copy(tmp_path / "other" / OTHER.folder / "key.json", tmp_path / KEY.folder / "key.json")
    with SoftLabelCache(0, tmp_path) as cache:
        assert cache.keys() == [], "the key of other labels"
    for damage in (b"", b"{", b"[" * 100_000):
        (tmp_path / KEY.folder / "key.json").write_bytes(damage)
        put(tmp_path, [8])
        assert load_labels(tmp_path).ids == (7, 8)


def test_of_several_keys_one_must_be_chosen(tmp_path: Path) -> None:
    put(tmp_path, [1])
    put(tmp_path, [2], OTHER)
    with pytest.raises(SettingsError, match=r"several keys(.|\n)*version='1'(.|\n)*"):
        load_labels(tmp_path)
    assert load_labels(tmp_path, OTHER).ids == (2,)
    with pytest.raises(SettingsError, match="no labels of CacheKey"):
        load_labels(tmp_path, CacheKey("resnet", "3", ("logits",)))


def test_several_folders_are_read_together(tmp_path: Path) -> None:
    """Machines that wrote to folders of their own; of several labels that of the last folder counts, not the newest."""
    parts = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    put(parts[1], [1, 2, 3])
    with SoftLabelCache(0, parts[0]) as cache:
        cache.view(KEY).put([3, 4], rows([3.5, 4.5]))
    parts[2].mkdir()
    for order, third in ((parts, 3.0), (parts[::-1], 3.5)):
        labels = load_labels(order)
        assert labels.ids == (1, 2, 3, 4)
        logits = labels.outputs["logits"]
        assert isinstance(logits, np.ndarray)
        assert logits[:, 0].tolist() == [1, 2, third, 4.5]
    for part in parts[:2]:  # as rsync does: a folder's files are whole in another
        shutil.copytree(part, tmp_path / "together", dirs_exist_ok=True)
    together = load_labels(tmp_path / "together")
    assert together.rows(range(1, 5))["logits"].tolist() == logits.tolist()  # type: ignore[union-attr]
    with pytest.raises(SettingsError, match=r"no label for sample 7 \(2 of 3 are missing\)"):
        together.rows([1, 7, 8])
    with pytest.raises(SettingsError, match="at least one"):
        load_labels([])
    with pytest.raises(SettingsError, match=r"d' is no folder"):
        load_labels([parts[0], tmp_path / "d"])
    with SoftLabelCache(0, parts[2]) as cache:
        cache.view(KEY).put([9], {"logits": np.zeros((1, 4), np.float32)})
    with pytest.raises(SettingsError, match=r"c' are 'logits' float32 \[4\], in .*a' .*\[100\]"):
        load_labels(parts)
    put(tmp_path / "e", [1], OTHER)
    with pytest.raises(SettingsError, match="several keys"):
        load_labels([parts[0], tmp_path / "e"])


def test_a_folder_without_labels_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="edl label"):
        load_labels(tmp_path)
    with pytest.raises(SettingsError, match="no folder"):
        load_labels(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()
