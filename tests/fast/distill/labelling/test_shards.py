"""`ShardLabeller`: a shard is reported when its labels are on disk, and bad rows are named."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.datasets.rows import ArrayData, Batch, IndexedData, SequenceData
from edl.distill import Options, Teachers
from edl.distill.cache import SoftLabelCache, load_labels
from edl.distill.labelling import (
    DataGuard,
    LabelPlan,
    LabelProgress,
    RowShard,
    ShardLabeller,
    ShardSource,
    note_files,
)
from edl.distill.pipeline.label_cache import CacheQueue
from edl.distill.transport.schema import OutputSpec
from edl.errors import ConflictError, NoTeacherError, PermanentError, TemporaryError
from edl.protocol.tensors import Array
from edl_serving.backends.callable import CallableBackend
from tests.fast.distill.conftest import Serve, Served

ROWS, WIDTH = 400, 4
X = np.repeat(np.arange(ROWS, dtype=np.float32)[:, None], WIDTH, axis=1)


class Shards(ShardSource):
    """Shards of `size` rows; says at each report what a reader finds on disk at that moment."""

    def __init__(self, folder: Path, rows: int = ROWS, size: int = 50) -> None:
        self.waiting = [RowShard(at, min(at + size, rows)) for at in range(0, rows, size)]
        self.open: list[RowShard] = []
        self.done: list[RowShard] = []
        self.failed: dict[tuple[int, int], str] = {}
        self.missing_on_disk = 0
        self.failure: Exception | None = None
        self._folder = folder
        self._lock = threading.Lock()
        self._more = threading.Condition(self._lock)

    def take(self, timeout_s: float) -> RowShard | None:
        with self._lock:
            if self.waiting:
                self.open.append(self.waiting.pop(0))
                return self.open[-1]
            if self.failure is not None:
                raise self.failure
            self._more.wait(timeout_s)
        return None

    @property
    def finished(self) -> bool:
        with self._lock:
            return not self.waiting and not self.open

    def report_done(self, shard: RowShard) -> None:
        there = set(load_labels(self._folder).ids)
        with self._lock:
            self.missing_on_disk += len(set(range(shard.start, shard.stop)) - there)
            self.open.remove(shard)
            self.done.append(shard)

    def report_failed(self, shard: RowShard, reason: str) -> None:
        with self._lock:
            self.open.remove(shard)
            self.failed[shard.start, shard.stop] = reason

    @property
    def done_rows(self) -> list[int]:
        return sorted(row for shard in self.done for row in range(shard.start, shard.stop))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "labels"


def label(
    folder: Path,
    teacher: Served,
    source: Shards,
    data: Any = None,
    tell: Callable[[LabelProgress], None] | None = None,
    files: Mapping[str, Any] | None = None,
    **options: Any,
) -> LabelProgress:
    teachers = Teachers(endpoints=(teacher.endpoint,))
    plan = LabelPlan(teachers, OutputSpec(outputs=("y",)), batch_rows=16, options=Options(**options))
    with (
        SoftLabelCache(0, folder) as cache,
        closing(ShardLabeller(DataGuard(data or ArrayData({"x": X}), files), plan, cache)) as labeller,
    ):
        assert labeller.key().outputs == ("y",)
        return labeller.label_shards(source, *([tell] if tell else []))


def picky(*bad: int) -> CallableBackend:
    def model(inputs: Any) -> Any:
        if set(inputs["x"][:, 0].astype(int).tolist()) & set(bad):
            raise ValueError("this row is bad")
        return {"y": inputs["x"]}

    return CallableBackend(model, ["x:fp32[4]"], version="1")


def check(folder: Path, *missing: int) -> None:
    found = load_labels(folder)
    assert sorted(set(range(ROWS)) - set(found.ids)) == list(missing)
    np.testing.assert_array_equal(found.rows(found.ids)["y"], X[list(found.ids)])


def test_shards_are_done_when_on_disk(serve: Serve, folder: Path) -> None:
    """Rows that are known are not asked for again, damaged ones excepted."""
    teacher, seen = serve("echo"), []
    assert label(folder, teacher, Shards(folder, rows=130)).labelled == 130
    file = folder / "labels.sqlite"
    damaged = bytearray(file.read_bytes())
    damaged[damaged.index(X[60].tobytes())] ^= 1
    file.write_bytes(damaged)
    source = Shards(folder)
    progress = label(folder, teacher, source, tell=lambda progress: seen.append(progress.labelled))
    assert (progress.known, progress.labelled) == (129, ROWS - 129)
    assert seen[-1] == ROWS - 129
    assert source.done_rows == list(range(ROWS))
    assert source.missing_on_disk == 0
    check(folder)
    assert label(folder, teacher, Shards(folder, size=5)).known == ROWS, "with no stream of batches to wait for"


def test_slow_disk_is_waited_for(serve: Serve, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it writes only when somebody waits for it. The queue holds a quarter of the labels."""
    waiting, drain, store = threading.Event(), CacheQueue.drain, CacheQueue._store_next

    def drain_slowly(queue: CacheQueue) -> bool:
        waiting.set()
        try:
            return drain(queue)
        finally:
            waiting.clear()

    def store_if_waited_for(queue: CacheQueue) -> float | None:
        return store(queue) if queue._closing or waiting.is_set() else 0.01

    monkeypatch.setattr(CacheQueue, "drain", drain_slowly)
    monkeypatch.setattr(CacheQueue, "_store_next", store_if_waited_for)
    source = Shards(folder)
    limits = {"cache_queue_bytes": 1 << 20, "memory_bytes": 1 << 20}
    assert label(folder, serve("echo", repeat=700), source, **limits).labelled == ROWS
    assert source.missing_on_disk == 0


def test_a_rewritten_file_ends_the_worker(serve: Serve, folder: Path, tmp_path: Path) -> None:
    """No shard with rows of both versions is reported, though the row is none of those that are compared."""
    path, source = tmp_path / "x.npy", Shards(folder)
    np.save(path, X)
    files = note_files(str(path))

    def tell(progress: LabelProgress) -> None:
        if progress.labelled > ROWS / 2:
            with path.open("r+b") as file:
                file.seek(-2 * X[0].nbytes, os.SEEK_END)
                file.write(X[0].tobytes())

    teacher, data = serve("echo"), ArrayData({"x": np.load(path, mmap_mode="r")})
    with pytest.raises(ConflictError, match=r"x\.npy was rewritten .*delete it, and run under a new --job name"):
        label(folder, teacher, source, data, tell, files)
    assert not {ROWS - 2} & {*source.done_rows}
    with pytest.raises(ConflictError, match="may have labels of both versions"):
        label(folder, teacher, Shards(folder), data)


def test_wrong_input_ends_the_worker(serve: Serve, folder: Path) -> None:
    """A mistake of this worker's own does not fail every shard of the job."""
    source = Shards(folder)
    words = r"3 shards failed here in a row.*7; others may be among 42 samples that were not tried: .*wants input 'x'"
    with pytest.raises(PermanentError, match=words):
        label(folder, serve("echo"), source, ArrayData({"image": X}))
    assert len(source.failed) == 3


class Failing:
    """A user's data set, a row of which cannot be read."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, at: int) -> Array:
        if at == 123:
            raise self.error
        return X[at]


def _itself(sample: Any) -> Any:
    return sample


def end_workers(data: SequenceData) -> None:
    """End a loader's processes here: the garbage collector might do so in any thread, and wait for each of them."""
    if data._workers:
        data._worker_processes._iterator._shutdown_workers()  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", [OSError(5, "the file is broken"), StopIteration()])
def test_unreadable_sample_is_named(serve: Serve, folder: Path, workers: int, error: Exception) -> None:
    """A loader's worker process passes a StopIteration on as its own end: the rest was waited for for ever."""
    if workers:
        pytest.importorskip("torch", reason="PyTorch is not installed")
    source = Shards(folder)
    data = SequenceData(Failing(error), {"x": _itself}, workers)
    label(folder, serve("echo"), source, data)
    end_workers(data)
    (reason,) = source.failed.values()
    assert reason.startswith("sample 123: ")
    assert (str(error) or "StopIteration") in reason
    assert source.missing_on_disk == 0
    check(folder, 123)


def test_lookahead_does_not_wait_for_shards(serve: Serve, folder: Path) -> None:
    """Processes that load ahead hold back no loaded rows while another worker's shard may come back."""
    pytest.importorskip("torch", reason="PyTorch is not installed")

    class Late(Shards):
        def take(self, timeout_s: float) -> RowShard | None:
            if len(self.waiting) == 1 and len(self.done) < 39:
                return None
            return super().take(timeout_s)

    source = Late(folder, size=10)
    data = SequenceData(X, {"x": _itself}, 2)
    label(folder, serve("echo"), source, data)
    end_workers(data)
    assert source.done_rows == list(range(ROWS))


def test_source_failure_ends_the_run(serve: Serve, folder: Path) -> None:
    """What was answered until then is on disk, and reported."""
    source = Shards(folder, rows=150)
    source.failure = TemporaryError("the master is away")
    with pytest.raises(TemporaryError, match="the master is away"):
        label(folder, serve("echo"), source)
    assert source.done_rows == list(range(150))
    assert source.missing_on_disk == 0


def test_no_teacher_fails_no_shard(serve: Serve, folder: Path) -> None:
    teacher, source = serve("echo"), Shards(folder)

    class Killing(IndexedData):
        inputs = ("x",)

        def load(self, parts: Any) -> Iterator[Batch]:
            for part in parts:
                if part[0] >= 200:
                    teacher.close()
                yield part.tolist(), {"x": X[part]}

    with pytest.raises(NoTeacherError):
        label(folder, teacher, source, Killing(ROWS, None), teacher_timeout_s=1.0)
    assert not source.failed
    assert source.missing_on_disk == 0


@pytest.mark.parametrize("step", ["report", "look-up", "tell"])
def test_unforeseen_error_ends_the_run(serve: Serve, folder: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Not only EDL's own errors: a shard that was popped and not reported would be waited for for ever."""
    unknown = ArrayData.unknown

    class Broken(Shards):
        def report_done(self, shard: RowShard) -> None:
            if step == "report":
                raise ZeroDivisionError("not foreseen")
            super().report_done(shard)

    def failing(data: ArrayData, known: Any, begin: int = 0, stop: int | None = None) -> Array:
        if step == "look-up" and begin == 100:
            raise ZeroDivisionError("not foreseen")
        return unknown(data, known, begin, stop)

    def tell(_: LabelProgress) -> None:
        if step == "tell":
            raise ZeroDivisionError("not foreseen")

    monkeypatch.setattr(ArrayData, "unknown", failing)
    source = Broken(folder)
    with pytest.raises(ZeroDivisionError):
        label(folder, serve("echo"), source, tell=tell)
    assert list(source.failed.values()) == ([] if step == "report" else ["ZeroDivisionError: not foreseen"])
    assert step != "look-up" or source.done_rows == list(range(100))


def test_bad_rows_are_named_others_labelled(serve: Serve, folder: Path) -> None:
    source = Shards(folder)
    label(folder, serve(picky(70, 77, 399)), source)
    assert sorted(source.failed) == [(50, 100), (350, 400)]
    first = source.failed[50, 100]
    assert first.startswith("samples 70, 77: ")
    assert "this row is bad" in first
    assert len(source.done) == 6
    check(folder, 70, 77, 399)
