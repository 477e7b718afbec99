"""Reading a whole folder of labels as arrays."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from edl.distill.cache import CacheKey, SoftLabelCache, load_labels
from edl.errors import SettingsError

KEY = CacheKey("resnet", "1", ("logits",), dataset="digits")


def write(path: Path, key: CacheKey, ids: list[int | str], value: float = 0.0) -> None:
    numbers = [float(sample) + value for sample in ids]
    with SoftLabelCache(0, path) as cache:
        cache.view(key).put(ids, {"logits": np.repeat(np.array(numbers, np.float32)[:, None], 3, axis=1)})


def test_damaged_label_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, KEY, [1, 2, 3])
    (file,) = tmp_path.glob("*/*.safetensors")
    data = bytearray(file.read_bytes())
    at = data.index(np.full(3, 2, np.float32).tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    assert load_labels(tmp_path).ids == (1, 3)
    assert "1 rows in" in caplog.text
    write(tmp_path, KEY, [2])
    assert load_labels(tmp_path).ids == (1, 2, 3)


def test_missing_labels_are_named(tmp_path: Path) -> None:
    write(tmp_path, KEY, [1, 2])
    with pytest.raises(SettingsError, match=r"no label for sample 7 \(2 of 3 are missing\)"):
        load_labels(tmp_path).rows([1, 7, 8])


def test_of_several_keys_one_must_be_chosen(tmp_path: Path) -> None:
    other = CacheKey("resnet", "2", ("logits",), dataset="digits")
    write(tmp_path, KEY, [1])
    write(tmp_path, other, [2])
    with pytest.raises(SettingsError, match=r"several keys(.|\n)*version='1'(.|\n)*"):
        load_labels(tmp_path)
    assert load_labels(tmp_path, other).ids == (2,)
    with pytest.raises(SettingsError, match="no labels of CacheKey"):
        load_labels(tmp_path, CacheKey("resnet", "3", ("logits",)))


def test_several_folders_are_read_together(tmp_path: Path) -> None:
    """Machines that wrote to folders of their own; the newest of several labels counts, in whichever folder."""
    parts = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    write(parts[1], KEY, [1, 2, 3])
    write(parts[0], KEY, [3, 4], 0.5)
    parts[2].mkdir()
    for order in (parts, parts[::-1]):
        labels = load_labels(order)
        assert labels.ids == (1, 2, 3, 4)
        logits = labels.outputs["logits"]
        assert isinstance(logits, np.ndarray)
        assert logits[:, 0].tolist() == [1, 2, 3.5, 4.5]
    for part in parts[:2]:  # as rsync does: a folder's files are whole in another
        shutil.copytree(part, tmp_path / "together", dirs_exist_ok=True)
    assert load_labels(tmp_path / "together").rows(range(1, 5))["logits"].tolist() == logits.tolist()  # type: ignore[union-attr]
    with pytest.raises(SettingsError, match="at least one"):
        load_labels([])
    with pytest.raises(SettingsError, match=r"d' is no folder"):
        load_labels([parts[0], tmp_path / "d"])
    with SoftLabelCache(0, parts[2]) as cache:
        cache.view(KEY).put([9], {"logits": np.zeros((1, 4), np.float32)})
    with pytest.raises(SettingsError, match=r"c' are 'logits' float32 \[4\], in .*a' .*\[3\]"):
        load_labels(parts)
    write(tmp_path / "e", CacheKey("other", "1", ("logits",)), [1])
    with pytest.raises(SettingsError, match="several keys"):
        load_labels([parts[0], tmp_path / "e"])


def test_a_folder_without_labels_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="edl label"):
        load_labels(tmp_path)
    with pytest.raises(SettingsError, match="no folder"):
        load_labels(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()
