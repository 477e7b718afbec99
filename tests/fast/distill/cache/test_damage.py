"""Files of the cache that are torn, damaged or foreign: what is read is right, or it is not there."""

from __future__ import annotations

import json
import logging
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edl.distill.cache import CacheKey, SoftLabelCache
from edl.distill.cache.layout import RowLayout
from edl.distill.cache.segment import BadSegmentError, FileHandles, Segment, encode
from edl.distill.compress import TopK, top_k
from edl.distill.transport.schema import OutputSpec
from edl.protocol.names import top_k_names
from tests.fast.distill.cache.cached_rows import KEY, OTHER, found, put, rows, segments


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING, "edl.distill"):
        yield lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("length", [0, 4, 8, 100, 0.5, -1])
def test_a_torn_file_is_skipped_and_named(tmp_path: Path, warnings_of: Callable[[], list[str]], length: float) -> None:
    put(tmp_path, range(50))
    torn = put(tmp_path, range(50, 100))[-1]
    size = torn.stat().st_size
    with torn.open("r+b") as file:
        file.truncate(int(size * length) if 0 < length < 1 else int(length) % size)
    assert found(tmp_path, [0, 49, 50, 99]) == [True, True, False, False]
    (warning,) = warnings_of()
    assert str(torn) in warning
    assert "torn" in warning
    put(tmp_path, range(50, 100))
    assert found(tmp_path, [0, 49, 50, 99]) == [True] * 4


def test_foreign_files_are_skipped_and_named(tmp_path: Path, warnings_of: Callable[[], list[str]]) -> None:
    """Foreign files are skipped, named and left alone."""
    (ours,) = put(tmp_path, range(10))
    (others,) = put(tmp_path, range(10, 20), OTHER)
    place = ours.parent
    shutil.copy(others, place / others.name)
    safetensors.numpy.save_file({"logits": np.zeros((5, 100), np.float32)}, place / "weights.safetensors")
    (place / "notes.txt").write_text("mine")
    (place / "huge.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"x" * 100)
    (place / "list.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]")
    (place / "folder.safetensors").mkdir()
    with SoftLabelCache(0, tmp_path) as cache:
        assert cache.view(KEY).get([0, 10]).mask.tolist() == [True, False]
        cache.view(KEY).disk.scan(force=True)  # type: ignore[union-attr]  # warns once only
        assert cache.stats().skipped_files == 6
    warned = warnings_of()
    assert len(warned) == 6
    for name in (others.name, "weights.safetensors", "notes.txt", "huge.safetensors", "list.safetensors", "folder"):
        assert any(name in warning for warning in warned)
    assert any("belongs to" in warning for warning in warned)
    put(tmp_path, range(500, 560), disk_bytes=64 << 10)
    assert (place / "notes.txt").exists()
    assert (place / "weights.safetensors").exists()


def test_rows_of_another_shape_are_skipped(tmp_path: Path, warnings_of: Callable[[], list[str]]) -> None:
    """Rows of another shape under the same key are skipped."""
    put(tmp_path, range(10))
    with SoftLabelCache(0, tmp_path / "elsewhere") as cache:
        cache.view(KEY).put([50], rows([50], width=7))
    (other,) = segments(tmp_path / "elsewhere")
    shutil.copy(other, tmp_path / KEY.folder / other.name)
    assert found(tmp_path, [0, 50]) == [True, False]
    (warning,) = warnings_of()
    assert "[7]" in warning
    assert "[100]" in warning


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("segment")
    with SoftLabelCache(0, path) as cache:
        cache.view(KEY).put(["a", "bc", "größe"], rows([1, 2, 3], 4))
    return segments(path)[0]


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_damaged_bytes_are_refused(whole_file: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Damaged bytes never do worse than to be refused."""
    damaged = bytearray(whole_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(damaged)
    handles = FileHandles()
    try:
        segment = Segment.open(path, KEY.folder, handles)
    except BadSegmentError:
        return
    assert all(isinstance(sample, int | str) for sample in segment.ids)
    whole = Segment.open(whole_file, KEY.folder, handles)
    right = dict(zip(whole.ids, whole.read(handles, 0, 3), strict=True))
    for sample, record in zip(segment.ids, segment.read(handles, 0, len(segment.ids)), strict=True):
        assert record in (None, right.get(sample)), "a label that is not the sample's own"


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x40
    file.write_bytes(data)


def where(file: Path, tensor: str) -> int:
    """The byte at which a tensor begins."""
    (length,) = struct.unpack("<Q", file.read_bytes()[:8])
    begin: int = json.loads(file.read_bytes()[8 : 8 + length])[tensor]["data_offsets"][0]
    return 8 + length + begin


@pytest.mark.parametrize("at_once", [True, False])
def test_damaged_row_is_a_miss(tmp_path: Path, warnings_of: Callable[[], list[str]], at_once: bool) -> None:
    """A damaged row is a miss that is said once, and can be put again."""
    (file,) = put(tmp_path, range(10))
    flip(file, where(file, "logits") + 7 * 400 + 399)
    with SoftLabelCache(0, tmp_path) as cache:
        view = cache.view(KEY)
        for _ in range(2):
            masks = [view.get(ids).mask for ids in ([range(10)] if at_once else [[number] for number in range(10)])]
            assert np.concatenate(masks).tolist() == [number != 7 for number in range(10)]
        np.testing.assert_array_equal(view.get([6, 8]).outputs["logits"], rows([6, 8])["logits"])
        assert not view.contains([7])[0]
        assert (cache.stats().damaged_rows, cache.stats().skipped_files) == (1, 0)
        (warning,) = warnings_of()
        assert f"{file} is damaged: the label of sample 7" in warning
        view.put([7], rows([7]))
        assert view.get([7]).complete
    assert found(tmp_path, range(10)) == [True] * 10


def test_damaged_ids_give_no_wrong_label(tmp_path: Path, warnings_of: Callable[[], list[str]]) -> None:
    """Ids that are damaged give no sample the label of another."""
    (file,) = put(tmp_path, range(10))
    flip(file, where(file, "sample_ids"))
    assert found(tmp_path, [*range(10), 0x40]) == [False] * 11
    (warning,) = warnings_of()
    assert "it is damaged: its ids or its header" in warning


def test_verifying_finds_unread_damage(tmp_path: Path) -> None:
    """Damage that nobody has read yet is found by verifying."""
    (file,) = put(tmp_path, range(200))
    flip(file, where(file, "logits") + 150 * 400)
    with SoftLabelCache(0, tmp_path) as cache:
        view = cache.view(KEY)
        assert view.contains([150])[0]
        view.verify()
        assert np.flatnonzero(~view.contains(range(200))).tolist() == [150]


def test_files_without_checksums_are_read(tmp_path: Path, warnings_of: Callable[[], list[str]]) -> None:
    (file,) = put(tmp_path, range(10))
    tensors = safetensors.numpy.load_file(file)
    del tensors["sample_ids.crc32"]
    metadata = {"format": "edl-soft-labels/1", "namespace": KEY.folder, "top_k": "{}"}
    file.write_bytes(safetensors.numpy.save(tensors, metadata))
    assert found(tmp_path, range(10)) == [True] * 10
    assert warnings_of() == []


@pytest.mark.parametrize("temperature", [4, np.float64(4), np.float32(4)])
def test_temperature_of_any_type_finds_top_k(tmp_path: Path, temperature: Any) -> None:
    """Top-k labels are found again whatever type of number the temperature was."""
    output_spec = OutputSpec(("logits",), top_k=2, temperature=temperature)
    labels = top_k(np.arange(12, dtype=np.float32).reshape(3, 4), 2, 4.0)
    labels = TopK(labels.ids, labels.values, labels.tail_lse, temperature, 4)
    key = CacheKey("resnet", "1", ("logits",), top_k=2, temperature=output_spec.temperature)
    with SoftLabelCache(0, tmp_path) as cache:
        cache.view(key).put([1, 2, 3], {"logits": labels})
        cache.flush(timeout_s=10)
    assert (type(output_spec.temperature), type(labels.temperature)) == (float, float)
    with SoftLabelCache(0, tmp_path) as cache:
        found = cache.view(key).get([1, 2, 3])
        assert found.complete
        assert found.outputs["logits"].temperature == 4.0  # type: ignore[union-attr]


def test_checksum_of_a_file_is_of_its_text(tmp_path: Path) -> None:
    parts = zip(top_k_names("y"), [(2,), (2,), ()], ["i4", "f4", "f4"], strict=True)
    arrays = {name: np.zeros((1, *shape), dtype) for name, shape, dtype in parts}
    layout = RowLayout.of(arrays, {"y": (4, 10)})
    file = tmp_path / "a.safetensors"
    file.write_bytes(encode("n", layout, [1], layout.pack(arrays)))
    assert Segment.open(file, "n", FileHandles()).layout == layout
