"""`ShardLabeller` against real teachers: a shard is reported when its labels are on disk, and bad rows are named."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import Options, Teachers
from edl.distill.cache import SoftLabelCache, load_labels
from edl.distill.datasets.kinds import ArrayData, Batch, IndexedData, SequenceData
from edl.distill.labelling import LabelPlan, LabelProgress, RowShard, ShardLabeller, ShardSource, shard_labeller
from edl.distill.labelling.bad_rows import BadRows, label_singly
from edl.distill.labelling.shard_tracker import ShardTracker
from edl.distill.transport.schema import OutputSpec
from edl.errors import EDLError, NoTeacherError, PermanentError, TemporaryError
from edl.protocol.tensors import Array
from edl.testing import LocalTeacher
from tests.fast.distill.conftest import Start

ROWS, WIDTH = 400, 4
X = np.repeat(np.arange(ROWS, dtype=np.float32)[:, None], WIDTH, axis=1)

PICKY = """
import numpy as np

BAD = {BAD}

def model(inputs):
    x = inputs["x"]
    if set(x[:, 0].astype(int).tolist()) & set(BAD):
        raise ValueError("this row is bad")
    return {{"y": x}}
"""


class Shards(ShardSource):
    """Shards of `size` rows; says at each report what a reader finds on disk at that moment."""

    def __init__(self, folder: Path, rows: int = ROWS, size: int = 50) -> None:
        self.waiting = [RowShard(at, min(at + size, rows)) for at in range(0, rows, size)]
        self.open: list[RowShard] = []
        self.done: list[RowShard] = []
        self.failed: dict[tuple[int, int], list[str]] = {}
        self.missing_on_disk = 0
        self.retries = 0
        self.failure: EDLError | None = None
        self._folder = folder
        self._lock = threading.Lock()

    def take(self, timeout_s: float) -> RowShard | None:
        with self._lock:
            if self.failure is not None:
                raise self.failure
            if self.waiting:
                self.open.append(self.waiting.pop(0))
                return self.open[-1]
        time.sleep(timeout_s)
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
            reasons = self.failed.setdefault((shard.start, shard.stop), [])
            reasons.append(reason)
            if len(reasons) <= self.retries:
                self.waiting.append(RowShard(shard.start, shard.stop))


def plan(teacher: LocalTeacher, **options: Any) -> LabelPlan:
    teachers = Teachers(endpoints=(teacher.endpoint,))
    return LabelPlan(teachers, OutputSpec(outputs=("y",)), batch_rows=16, options=Options(**options))


def hurried(source: Shards) -> Shards:
    """End a run that hangs by an error, which no test expects."""

    def fail() -> None:
        source.failure = TemporaryError("the run hangs")

    timer = threading.Timer(90, fail)  # a teacher's start, which some tests begin with, is in it
    timer.daemon = True
    timer.start()
    return source


def picky(tmp_path: Path, *bad: int) -> LocalTeacher:
    path = tmp_path / "picky.py"
    path.write_text(PICKY.format(BAD=list(bad)))
    return LocalTeacher("", serve={"callable": f"{path}:model", "input": "x:fp32[4]", "model-version": "1"})


def rows_of(shards: list[RowShard]) -> list[int]:
    return sorted(row for shard in shards for row in range(shard.start, shard.stop))


def test_shards_are_done_when_on_disk(start: Start, tmp_path: Path) -> None:
    source = Shards(tmp_path / "labels")
    seen: list[int] = []
    with (
        SoftLabelCache(0, tmp_path / "labels", flush_interval_s=60) as cache,
        ShardLabeller(ArrayData({"x": X}), plan(start("echo")), cache) as labeller,
    ):
        assert labeller.key().outputs == ("y",)
        report = labeller.run(source, lambda progress: seen.append(progress.labelled))
    assert rows_of(source.done) == list(range(ROWS))
    assert source.missing_on_disk == 0
    assert report.progress.labelled == ROWS == seen[-1]
    np.testing.assert_array_equal(load_labels(tmp_path / "labels").rows(range(ROWS))["y"], X)


def test_known_rows_are_not_asked_again(start: Start, tmp_path: Path) -> None:
    """What a killed worker left on disk counts, damaged rows excepted."""
    teacher = start("echo")
    with (
        SoftLabelCache(0, tmp_path / "labels") as cache,
        ShardLabeller(ArrayData({"x": X}), plan(teacher), cache) as labeller,
    ):
        labeller.run(Shards(tmp_path / "labels", rows=130))
    (file,) = (tmp_path / "labels").glob("*/*.safetensors")
    damaged = bytearray(file.read_bytes())
    damaged[damaged.index(X[60].tobytes())] ^= 1
    file.write_bytes(damaged)
    source = Shards(tmp_path / "labels")
    with (
        SoftLabelCache(0, tmp_path / "labels") as cache,
        ShardLabeller(ArrayData({"x": X}), plan(teacher), cache) as labeller,
    ):
        progress = labeller.run(source).progress
    assert (progress.known, progress.labelled) == (129, ROWS - 129)
    assert rows_of(source.done) == list(range(ROWS))
    np.testing.assert_array_equal(load_labels(tmp_path / "labels").rows(range(ROWS))["y"], X)


def test_bad_rows_are_named_others_labelled(tmp_path: Path) -> None:
    with picky(tmp_path, 70, 77, 399) as teacher:
        source = Shards(tmp_path / "labels")
        source.retries = 1
        with (
            SoftLabelCache(0, tmp_path / "labels") as cache,
            ShardLabeller(ArrayData({"x": X}), plan(teacher), cache) as labeller,
        ):
            labeller.run(source)
    assert sorted(source.failed) == [(50, 100), (350, 400)]
    assert all(len(reasons) == 2 for reasons in source.failed.values())
    first = source.failed[50, 100][0]
    assert first.startswith("samples 70, 77: ")
    assert "this row is bad" in first
    assert len(source.done) == 6
    labels = load_labels(tmp_path / "labels")
    assert sorted(set(range(ROWS)) - set(labels.ids)) == [70, 77, 399], "the others of these shards have labels"
    np.testing.assert_array_equal(labels.rows(labels.ids)["y"], X[list(labels.ids)])


def test_wrong_input_ends_the_worker(start: Start, tmp_path: Path) -> None:
    """A mistake of this worker's own does not fail every shard of the job."""
    source = Shards(tmp_path / "labels")
    with (
        SoftLabelCache(0, tmp_path / "labels") as cache,
        ShardLabeller(ArrayData({"image": X}), plan(start("echo")), cache) as labeller,
        pytest.raises(PermanentError, match=r"3 shards failed here one after the other.*wants input 'x'"),
    ):
        labeller.run(source)
    assert len(source.failed) == 3


class Unreadable:
    """A user's data set, a row of which cannot be read."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, at: int) -> Array:
        if at == 123:
            raise OSError(5, "the file is broken")
        row: Array = X[at]
        return row


def _itself(sample: Any) -> Any:
    return sample


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_sample_is_named(start: Start, tmp_path: Path, workers: int) -> None:
    if workers:
        pytest.importorskip("torch", reason="PyTorch is not installed")
    source = Shards(tmp_path / "labels")
    data = SequenceData(Unreadable(), {"x": _itself}, workers)
    with (
        SoftLabelCache(0, tmp_path / "labels") as cache,
        ShardLabeller(data, plan(start("echo")), cache) as labeller,
    ):
        labeller.run(source)
    ((reason,),) = source.failed.values()
    assert reason.startswith("sample 123: ")
    assert "the file is broken" in reason
    assert len(load_labels(tmp_path / "labels")) == ROWS - 1
    assert source.missing_on_disk == 0


def test_lookahead_does_not_wait_for_shards(start: Start, tmp_path: Path) -> None:
    """Processes that load ahead hold back no loaded rows while another worker's shard may come back."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    source = Shards(tmp_path / "labels", size=10)
    last = source.waiting.pop()

    class Late(Shards):
        def take(self, timeout_s: float) -> RowShard | None:
            if len(source.done) == 39 and last not in source.open:
                source.open.append(last)
                return last
            return source.take(timeout_s)

        finished = property(lambda _: len(source.done) == 40)

        def report_done(self, shard: RowShard) -> None:
            source.report_done(shard)

    samples = SequenceData(X, {"x": _itself}, 2)
    with (
        SoftLabelCache(0, tmp_path / "labels") as cache,
        ShardLabeller(samples, plan(start("echo")), cache) as labeller,
    ):
        labeller.run(Late(tmp_path / "labels"))
    assert rows_of(source.done) == list(range(ROWS))


def test_source_failure_ends_the_run(start: Start, tmp_path: Path) -> None:
    """What was answered until then is on disk, and reported."""
    source = Shards(tmp_path / "labels")
    source.waiting = source.waiting[:3]

    class Failing(Shards):
        def take(self, timeout_s: float) -> RowShard | None:
            if not source.waiting:
                raise TemporaryError("the master is away")
            return source.take(timeout_s)

        def report_done(self, shard: RowShard) -> None:
            source.report_done(shard)

    with (
        SoftLabelCache(0, tmp_path / "labels", flush_interval_s=60) as cache,
        ShardLabeller(ArrayData({"x": X}), plan(start("echo")), cache) as labeller,
        pytest.raises(TemporaryError, match="the master is away"),
    ):
        labeller.run(Failing(tmp_path / "labels"))
    assert rows_of(source.done) == list(range(150))
    assert source.missing_on_disk == 0


def test_interrupt_reports_what_is_on_disk(start: Start, tmp_path: Path) -> None:
    teacher = start("echo", delay_s=0.01, max_batch=16)
    source = Shards(tmp_path / "labels")

    def interrupt(progress: LabelProgress) -> None:
        if progress.labelled >= 100:  # answers come in order: the first two shards are labelled
            raise KeyboardInterrupt

    with (
        SoftLabelCache(0, tmp_path / "labels", flush_interval_s=60) as cache,
        ShardLabeller(ArrayData({"x": X}), plan(teacher), cache) as labeller,
        pytest.raises(KeyboardInterrupt),
    ):
        labeller.run(source, interrupt)
    assert 100 <= len(rows_of(source.done)) < ROWS
    assert source.missing_on_disk == 0
    assert set(rows_of(source.done)) <= set(load_labels(tmp_path / "labels").ids)


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="there is no /dev/full here")
def test_full_disk_fails_no_shard(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker ends with the disk's words; its shards are neither done nor failed."""
    source = Shards(tmp_path / "labels")
    full = os.open("/dev/full", os.O_WRONLY)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(full if len(data) > 1000 else fd, data))
    with (
        SoftLabelCache(0, tmp_path / "labels") as cache,
        ShardLabeller(ArrayData({"x": X}), plan(start("echo")), cache) as labeller,
        pytest.raises(TemporaryError, match="No space left on device"),
    ):
        labeller.run(source)
    os.close(full)
    assert not source.done
    assert not source.failed


def test_no_teacher_fails_no_shard(start: Start, tmp_path: Path) -> None:
    teacher = start("echo", delay_s=0.02, max_batch=16)
    source = Shards(tmp_path / "labels")

    class Killing(IndexedData):
        inputs = ("x",)

        def load(self, parts: Any) -> Iterator[Batch]:
            for part in parts:
                if part[0] >= 200:
                    teacher.kill()
                yield part.tolist(), {"x": X[part]}

    with (
        SoftLabelCache(0, tmp_path / "labels") as cache,
        ShardLabeller(Killing(ROWS, None), plan(teacher, teacher_timeout_s=1.0), cache) as labeller,
        pytest.raises(NoTeacherError),
    ):
        labeller.run(source)
    assert not source.failed
    assert source.missing_on_disk == 0


def test_interrupted_retry_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another shard's failure ends the epoch while the rows of a shard are tried singly: that shard is tried again."""
    calls: list[int] = []

    def interrupted(*args: Any) -> BadRows:
        calls.append(0)
        if len(calls) > 1:
            return label_singly(*args)
        deadline = time.monotonic() + 60
        while not args[-1]() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert args[-1](), "the epoch has ended"
        return BadRows({}, 1, 0)

    monkeypatch.setattr(shard_labeller, "label_singly", interrupted)
    known, source = Shards(tmp_path / "labels"), hurried(Shards(tmp_path / "labels", rows=100))
    known.waiting = [RowShard(50, 60), RowShard(61, 100)]
    with (
        picky(tmp_path, 10) as teacher,
        SoftLabelCache(0, tmp_path / "labels") as cache,
        ShardLabeller(ArrayData({"x": X}), plan(teacher), cache) as labeller,
    ):
        labeller.run(known)
        labeller.run(source)
    assert [(shard.start, shard.stop) for shard in source.done] == [(50, 100)]
    assert sorted(source.failed) == [(0, 50)]


def test_unforeseen_report_error_ends_run(start: Start, tmp_path: Path) -> None:
    """Not only EDL's own errors: a shard that was popped and not reported would be waited for for ever."""

    class Broken(Shards):
        def report_done(self, shard: RowShard) -> None:
            raise ZeroDivisionError("not foreseen")

    with (
        SoftLabelCache(0, tmp_path / "labels") as cache,
        ShardLabeller(ArrayData({"x": X}), plan(start("echo")), cache) as labeller,
        pytest.raises(ZeroDivisionError),
    ):
        labeller.run(hurried(Broken(tmp_path / "labels")))


def test_commit_fails_between_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No epoch is there to be closed at that moment: the next one ends."""
    note_failure = shard_labeller._ShardRun._fail
    ended = threading.Event()

    class Refusing(Shards):
        def report_done(self, shard: RowShard) -> None:
            assert ended.wait(60), "no shard has failed"
            raise TemporaryError("not now")

    def late(run: Any, failure: PermanentError) -> None:
        ended.set()
        deadline = time.monotonic() + 60
        while run._commit_failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        note_failure(run, failure)

    monkeypatch.setattr(shard_labeller._ShardRun, "_fail", late)
    with (
        picky(tmp_path, 70) as teacher,
        SoftLabelCache(0, tmp_path / "labels") as cache,
        ShardLabeller(ArrayData({"x": X}), plan(teacher), cache) as labeller,
        pytest.raises(TemporaryError, match="not now"),
    ):
        labeller.run(hurried(Refusing(tmp_path / "labels")))


def test_forgotten_shard_ends_the_run(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has forgotten it: others get its rows, rather than all of them waiting for ever."""
    begin = ShardTracker.begin

    def forget(tracker: ShardTracker, shard: RowShard, parts: Any) -> None:
        if shard.start != 150:
            begin(tracker, shard, parts)

    monkeypatch.setattr(ShardTracker, "begin", forget)
    source = hurried(Shards(tmp_path / "labels"))
    with (
        SoftLabelCache(0, tmp_path / "labels") as cache,
        ShardLabeller(ArrayData({"x": X}), plan(start("echo")), cache) as labeller,
        pytest.raises(PermanentError, match=r"rows 150 to 199 were taken.*fault of EDL"),
    ):
        labeller.run(source)
    assert rows_of(source.done) == [*range(150), *range(200, ROWS)], "what is on disk is reported"


@pytest.mark.parametrize("shards", [1, 3])
def test_unforeseen_look_up_error_ends_run(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    """It is no row's, and fails no shard, though it comes while rows are loaded."""
    unknown = ArrayData.unknown

    def failing(data: ArrayData, known: Any, begin: int = 0, stop: int | None = None) -> Array:
        if begin == 50 * (shards - 1) and "_is_whole" in known.__qualname__:
            raise OSError(5, "the disk is broken")
        return unknown(data, known, begin, stop)

    monkeypatch.setattr(ArrayData, "unknown", failing)
    source = hurried(Shards(tmp_path / "labels"))
    with (
        SoftLabelCache(0, tmp_path / "labels") as cache,
        ShardLabeller(ArrayData({"x": X}), plan(start("echo")), cache) as labeller,
        pytest.raises(OSError, match="the disk is broken"),
    ):
        labeller.run(source)
    assert not source.failed
    assert rows_of(source.done) == list(range(50 * (shards - 1)))


class Ending(Unreadable):
    """A user's data set, whose code lets a StopIteration out."""

    def __getitem__(self, at: int) -> Array:
        if at == 123:
            raise StopIteration
        row: Array = X[at]
        return row


@pytest.mark.parametrize("workers", [0, 2])
def test_stop_iteration_fails_its_shard(start: Start, tmp_path: Path, workers: int) -> None:
    """A loader's worker process passes it on as its own end: the rest was waited for for ever."""
    if workers:
        pytest.importorskip("torch", reason="PyTorch is not installed")
    source = hurried(Shards(tmp_path / "labels"))
    with (
        SoftLabelCache(0, tmp_path / "labels") as cache,
        ShardLabeller(SequenceData(Ending(), {"x": _itself}, workers), plan(start("echo")), cache) as labeller,
    ):
        labeller.run(source)
    ((reason,),) = source.failed.values()
    assert reason.startswith("sample 123: ")
    assert "StopIteration" in reason
    assert len(load_labels(tmp_path / "labels")) == ROWS - 1
