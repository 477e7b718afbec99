"""The cache's folder: bounds, several processes, kill -9, and files that are torn or foreign."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edl.distill.cache import CacheKey, SoftLabelCache, folder
from edl.distill.cache.layout import RowLayout
from edl.distill.cache.segment import BadSegmentError, Handles, Segment, encode
from edl.distill.compress import TopK, top_k
from edl.distill.request import Ask
from edl.errors import TemporaryError
from edl.protocol.names import top_k_names

Array = np.ndarray[Any, Any]
KEY = CacheKey("resnet", "1", ("logits",), dataset="digits")
OTHER = CacheKey("resnet", "2", ("logits",), dataset="digits")


def rows(ids: Any, width: int = 100) -> dict[str, Array]:
    """Labels that tell whose they are."""
    return {"logits": np.repeat(np.asarray(ids, np.float32)[:, None], width, axis=1)}


def put(path: Path, ids: Any, key: CacheKey = KEY, **arguments: Any) -> list[Path]:
    """Write rows into a file of their own; the files of the key afterwards, oldest first."""
    with SoftLabelCache(0, path, **arguments) as cache:
        cache.view(key).put(ids, rows(ids))
        cache.flush()
    return segments(path, key)


def segments(path: Path, key: CacheKey = KEY) -> list[Path]:
    return sorted((path / key.folder).glob("*.safetensors"))


def nbytes(path: Path) -> int:
    """The size of all files at one moment: counted again where files came or went meanwhile."""
    while True:
        before = sorted(path.rglob("*"))
        try:
            total = sum(file.stat().st_size for file in before if file.is_file())
        except FileNotFoundError:
            continue
        if sorted(path.rglob("*")) == before:
            return total


def found(path: Path, ids: Any, key: CacheKey = KEY) -> list[bool]:
    """Which ids a newly opened cache finds, after checking that their labels are theirs."""
    with SoftLabelCache(0, path) as cache:
        got = cache.view(key).get(ids)
        there = np.asarray(ids)[got.mask]
        if len(there):
            np.testing.assert_array_equal(got.outputs["logits"], rows(there)["logits"])  # type: ignore[arg-type]
        return list(map(bool, got.mask))


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING, "edl.distill"):
        yield lambda: [record.getMessage() for record in caplog.records]


def test_labels_outlive_the_process_and_other_programs_can_read_them(tmp_path: Path) -> None:
    (file,) = put(tmp_path, [3, 1, 2])
    tensors = safetensors.numpy.load_file(file)
    assert tensors["sample_ids"].tolist() == [3, 1, 2]
    np.testing.assert_array_equal(tensors["logits"], rows([3, 1, 2])["logits"])
    assert json.loads((file.parent / "key.json").read_text())["dataset"] == "digits"
    assert found(tmp_path, [1, 2, 3, 4]) == [True, True, True, False]


def test_no_file_is_pickled(tmp_path: Path) -> None:
    (file,) = put(tmp_path, [1])
    (length,) = struct.unpack("<Q", file.read_bytes()[:8])
    assert json.loads(file.read_bytes()[8 : 8 + length])["logits"]["dtype"] == "F32"


def test_rows_reach_the_disk_without_being_asked_to(tmp_path: Path) -> None:
    with SoftLabelCache(0, tmp_path, flush_interval_s=0.05) as cache:
        for ids in ([1, 2], [3, 4]):
            cache.view(KEY).put(ids, rows(ids))
            deadline = time.monotonic() + 20
            while not all(found(tmp_path, ids)):
                assert time.monotonic() < deadline
                time.sleep(0.02)


def test_of_several_labels_of_one_sample_the_newest_counts_after_reopening_too(tmp_path: Path) -> None:
    with SoftLabelCache(0, tmp_path) as cache:
        for value in (7.0, 8.0, 9.0):
            cache.view(KEY).put([1, 2], {"logits": np.full((2, 3), value, np.float32)})
            cache.flush()
            assert cache.view(KEY).get([1]).outputs["logits"][0, 0] == value  # type: ignore[index]
    assert len(segments(tmp_path)) == 3
    with SoftLabelCache(0, tmp_path) as cache:
        assert cache.view(KEY).get([2]).outputs["logits"][0, 0] == 9.0  # type: ignore[index]
        assert cache.view(KEY).ids() == [1, 2]


def test_the_bound_on_disk_holds_at_every_moment(tmp_path: Path) -> None:
    bound, largest, stop = 128 << 10, 0, threading.Event()

    def watch() -> None:
        nonlocal largest
        while not stop.is_set():
            largest = max(largest, nbytes(tmp_path))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with SoftLabelCache(0, tmp_path, bound) as cache:
            for start in range(0, 4000, 20):
                cache.view(KEY if start % 40 else OTHER).put(range(start, start + 20), rows(range(start, start + 20)))
            cache.flush()
            stats = cache.stats()
    finally:
        stop.set()
        watcher.join()
    assert bound / 2 < largest <= bound
    assert stats.disk_bytes == nbytes(tmp_path) <= bound
    assert stats.evicted_segments > 10
    assert found(tmp_path, range(3980, 4000)) == [True] * 20  # the newest are there


def test_the_oldest_files_go_first_whatever_they_belong_to(
    tmp_path: Path, warnings_of: Callable[[], list[str]]
) -> None:
    put(tmp_path, range(60), OTHER)
    (kept,) = put(tmp_path, range(60))
    put(tmp_path, range(100, 160), disk_bytes=65 << 10)
    assert not (tmp_path / OTHER.folder).exists()
    assert kept in segments(tmp_path)
    assert not warnings_of()
    put(tmp_path, range(200, 260), disk_bytes=65 << 10)
    assert kept not in segments(tmp_path)
    (warning,) = warnings_of()
    assert "raise disk_bytes=66560" in warning


def test_a_file_larger_than_the_bound_evicts_nothing_and_is_reported(
    tmp_path: Path, warnings_of: Callable[[], list[str]]
) -> None:
    (kept,) = put(tmp_path, range(10))
    with SoftLabelCache(1 << 20, tmp_path, 64 << 10) as cache:
        cache.view(KEY).put([99], {"logits": np.zeros((1, 100), np.float32)})
        cache.flush()
        big = CacheKey("wide", "1", ("logits",))
        cache.view(big).put([1], {"logits": np.zeros((1, 50_000), np.float32)})
        with pytest.raises(TemporaryError, match=r"1 rows could not be written: 200\d+ bytes do not fit into 65536"):
            cache.flush()
        cache.flush()  # told once
        assert cache.view(big).get([1]).complete  # memory has it
        assert cache.stats().failed_writes == 1
    assert kept.exists()
    (warning,) = warnings_of()
    assert "1 rows were not written" in warning


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


def test_foreign_files_are_skipped_named_and_left_alone(tmp_path: Path, warnings_of: Callable[[], list[str]]) -> None:
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


def test_rows_of_another_shape_under_the_same_key_are_skipped(
    tmp_path: Path, warnings_of: Callable[[], list[str]]
) -> None:
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


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_never_do_worse_than_to_be_refused(whole_file: Path, tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(whole_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(damaged)
    handles = Handles()
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
def test_a_damaged_row_is_a_miss_that_is_said_once_and_can_be_put_again(
    tmp_path: Path, warnings_of: Callable[[], list[str]], at_once: bool
) -> None:
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


def test_ids_that_are_damaged_give_no_sample_the_label_of_another(
    tmp_path: Path, warnings_of: Callable[[], list[str]]
) -> None:
    (file,) = put(tmp_path, range(10))
    flip(file, where(file, "sample_ids"))
    assert found(tmp_path, [*range(10), 0x40]) == [False] * 11
    (warning,) = warnings_of()
    assert "it is damaged: its ids or its header" in warning


def test_damage_that_nobody_has_read_yet_is_found_by_verifying(tmp_path: Path) -> None:
    (file,) = put(tmp_path, range(200))
    flip(file, where(file, "logits") + 150 * 400)
    with SoftLabelCache(0, tmp_path) as cache:
        view = cache.view(KEY)
        assert view.contains([150])[0]
        view.verify()
        assert np.flatnonzero(~view.contains(range(200))).tolist() == [150]


def test_files_without_checksums_are_read_as_before(tmp_path: Path, warnings_of: Callable[[], list[str]]) -> None:
    (file,) = put(tmp_path, range(10))
    tensors = safetensors.numpy.load_file(file)
    del tensors["sample_ids.crc32"]
    metadata = {"format": "edl-soft-labels/1", "namespace": KEY.folder, "top_k": "{}"}
    file.write_bytes(safetensors.numpy.save(tensors, metadata))
    assert found(tmp_path, range(10)) == [True] * 10
    assert warnings_of() == []


@pytest.mark.parametrize("temperature", [4, np.float64(4), np.float32(4)])
def test_top_k_labels_are_found_again_whatever_type_of_number_the_temperature_was(
    tmp_path: Path, temperature: Any
) -> None:
    ask = Ask(("logits",), top_k=2, temperature=temperature)
    labels = top_k(np.arange(12, dtype=np.float32).reshape(3, 4), 2, 4.0)
    labels = TopK(labels.ids, labels.values, labels.tail_lse, temperature, 4)
    key = CacheKey("resnet", "1", ("logits",), top_k=2, temperature=ask.temperature)
    with SoftLabelCache(0, tmp_path) as cache:
        cache.view(key).put([1, 2, 3], {"logits": labels})
        cache.flush(timeout_s=10)
    assert (type(ask.temperature), type(labels.temperature)) == (float, float)
    with SoftLabelCache(0, tmp_path) as cache:
        found = cache.view(key).get([1, 2, 3])
        assert found.complete
        assert found.outputs["logits"].temperature == 4.0  # type: ignore[union-attr]


def test_a_files_checksum_is_that_of_the_text_in_it(tmp_path: Path) -> None:
    arrays = {name: np.zeros((1, *shape), "f4") for name, shape in zip(top_k_names("y"), [(2,), (2,), ()], strict=True)}
    layout = RowLayout.of(arrays, {"y": (4, 10)})
    file = tmp_path / "a.safetensors"
    file.write_bytes(encode("n", layout, [1], layout.pack(arrays)))
    assert Segment.open(file, "n", Handles()).layout == layout


def test_rows_that_cannot_be_written_hold_up_neither_others_nor_who_waits(
    tmp_path: Path, warnings_of: Callable[[], list[str]]
) -> None:
    with SoftLabelCache(0, tmp_path) as cache:
        bad = cache.view(KEY)
        bad.put([1], rows([1]))
        assert bad.disk is not None
        assert bad.disk.layout is not None
        bad.disk.layout = RowLayout(bad.disk.layout.columns, {"logits": (object(), None)})  # type: ignore[dict-item]
        with pytest.raises(TemporaryError, match="TypeError"):
            cache.flush(timeout_s=10)
        assert cache.stats().failed_writes == 1
        cache.view(OTHER).put([2], rows([2]))
        cache.flush(timeout_s=10)
    assert found(tmp_path, [2], OTHER) == [True]
    assert sum("1 rows were not written, and will be asked for again: TypeError" in one for one in warnings_of()) == 1


def test_files_that_vanish_or_shrink_under_a_reader_are_misses(
    tmp_path: Path, warnings_of: Callable[[], list[str]]
) -> None:
    for start in (0, 50, 100):
        put(tmp_path, range(start, start + 50))
    files = segments(tmp_path)
    with SoftLabelCache(0, tmp_path) as cache:
        cache._handles.clear()
        view = cache.view(KEY)
        files[0].unlink()
        os.truncate(files[1], 10)
        cache._handles.clear()
        assert view.get([0, 99, 100, 51]).mask.tolist() == [False, False, True, False]
        assert view.contains([0, 99, 100]).tolist() == [False, False, True]
        view.put([0, 99], rows([0, 99]))
        assert view.get([0, 99, 100]).complete
    (warning,) = warnings_of()
    assert str(files[1]) in warning


def test_a_folder_that_cannot_be_written_costs_no_labels_in_memory(
    tmp_path: Path, warnings_of: Callable[[], list[str]]
) -> None:
    (tmp_path / KEY.folder).write_text("in the way")
    with SoftLabelCache(1 << 20, tmp_path) as cache:
        view = cache.view(KEY)
        for start in (0, 10):
            view.put(range(start, start + 10), rows(range(start, start + 10)))
            with pytest.raises(TemporaryError, match="10 rows could not be written: File exists"):
                cache.flush()
        assert view.get(range(20)).complete
        (tmp_path / KEY.folder).unlink()
        view.put(range(20), rows(range(20)))
        cache.flush()
    assert found(tmp_path, range(20)) == [True] * 20
    assert len([warning for warning in warnings_of() if "asked for again" in warning]) == 1


def test_a_process_that_holds_the_lock_for_ever_hangs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_LOCK_S", 0.2)
    with SoftLabelCache(1 << 20, tmp_path) as cache:
        fd = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(fd, fcntl.LOCK_EX)
        cache.view(KEY).put([1], rows([1]))
        with pytest.raises(TemporaryError, match=r"another process has held .*lock for 0.2 s"):
            cache.flush()
        os.close(fd)
        cache.view(KEY).put([1], rows([1]))
        cache.flush()


def test_what_another_process_writes_is_found(tmp_path: Path) -> None:
    with SoftLabelCache(0, tmp_path) as mine, SoftLabelCache(0, tmp_path) as other:
        view = mine.view(KEY)
        assert not view.get([1]).complete
        other.view(KEY).put([1], rows([1]))
        other.flush()
        deadline = time.monotonic() + 20
        while not view.get([1]).complete:
            assert time.monotonic() < deadline
            time.sleep(0.05)


_WRITE = """
import sys
import numpy as np
from edl.distill.cache import CacheKey, SoftLabelCache
path, first, last, bound = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) or None
cache = SoftLabelCache(1 << 16, path, bound, flush_interval_s=0.01)
view = cache.view(CacheKey("resnet", "1", ("logits",), dataset="digits"))
for start in range(first, last, 20):
    ids = np.arange(start, start + 20)
    view.put(ids, {"logits": np.repeat(ids[:, None].astype(np.float32), 100, axis=1)})
    cache.flush()
    print(start + 20, flush=True)
cache.close()
"""


def writer(path: Path, first: int, last: int, bound: int = 0) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", _WRITE, str(path), str(first), str(last), str(bound)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_processes_that_write_at_the_same_time_do_not_clash(
    tmp_path: Path, warnings_of: Callable[[], list[str]]
) -> None:
    processes = [writer(tmp_path, first, first + 400) for first in (0, 1000, 2000)]
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    for first in (0, 1000, 2000):
        assert all(found(tmp_path, range(first, first + 400)))
    assert len(segments(tmp_path)) == 60
    assert not warnings_of()


def test_processes_that_share_a_bound_keep_it_together(tmp_path: Path) -> None:
    bound, largest = 100 << 10, 0
    processes = [writer(tmp_path, first, first + 1000, bound) for first in (0, 10_000)]
    while any(process.poll() is None for process in processes):
        largest = max(largest, nbytes(tmp_path))
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert bound / 2 < largest <= bound
    assert sum(found(tmp_path, [*range(1000), *range(10_000, 11_000)])) > 100


@pytest.mark.parametrize("after", [1, 7])
def test_kill_9_costs_no_row_that_was_flushed_and_leaves_nothing_torn(
    tmp_path: Path, warnings_of: Callable[[], list[str]], after: int
) -> None:
    process = writer(tmp_path, 0, 1_000_000)
    assert process.stdout is not None
    flushed = 0
    for _ in range(after):
        flushed = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert all(found(tmp_path, range(flushed)))
    assert not warnings_of()
    put(tmp_path, [999_999])
    assert all(re.fullmatch(r"key\.json|\d{20}-.*\.safetensors", path.name) for path in tmp_path.glob("*/*"))


def test_what_a_killed_writer_left_is_not_read_and_goes_with_the_next_write(tmp_path: Path) -> None:
    (whole,) = put(tmp_path, range(10))
    left = whole.with_name(".writing-" + whole.name.replace(whole.name[:20], "9" * 20))
    left.write_bytes(whole.read_bytes()[:300])
    assert found(tmp_path, range(10)) == [True] * 10
    assert left.exists()
    put(tmp_path, range(10, 20))
    assert not left.exists()


@pytest.mark.parametrize("ids", [[""], ["größe", "", "a/b"], [-(2**63), 2**63 - 1]])
def test_unusual_ids_survive_the_disk(tmp_path: Path, ids: list[Any]) -> None:
    with SoftLabelCache(0, tmp_path) as cache:
        cache.view(KEY).put(ids, rows(range(len(ids))))
    with SoftLabelCache(0, tmp_path) as cache:
        assert cache.view(KEY).ids() == ids
        np.testing.assert_array_equal(
            cache.view(KEY).get(ids).outputs["logits"],  # type: ignore[arg-type]
            rows(range(len(ids)))["logits"],
        )


def test_a_row_put_while_the_older_one_was_being_written_stays_to_be_written(tmp_path: Path) -> None:
    with SoftLabelCache(0, tmp_path) as cache:
        namespace = cache.view(KEY).disk
        assert namespace is not None
        older, newer = b"older", b"newer"
        namespace.pending.update({1: newer, 2: older})
        namespace.written([1, 2], [older, older])
        assert namespace.pending == {1: newer}
        namespace.pending.clear()


def test_a_row_put_while_the_older_one_was_being_read_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older row must not get into memory, where it would be found first, when the newer one found no room there."""
    put(tmp_path, [1])
    with SoftLabelCache(1 << 20, tmp_path) as cache:
        view = cache.view(KEY)
        assert view.disk is not None
        read = view.disk.read

        def read_slowly(place: Any) -> Any:
            records = read(place)
            with monkeypatch.context() as full:
                full.setattr(cache._memory, "limit_bytes", 0)
                view.put([1], rows([7]))
            return records

        monkeypatch.setattr(view.disk, "read", read_slowly)
        view.get([1])
        assert view.get([1]).outputs["logits"][0, 0] == 7  # type: ignore[index]
