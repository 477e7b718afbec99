"""`DistillReader` with real teachers: order, each sample once with its own labels, whatever source and teachers do."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options, Teachers
from edl.errors import ClosedError, SettingsError, SourceError, TemporaryError
from tests.fast.distill.conftest import Register, Serve
from tests.fast.distill.reading import WIDTH, check, reader_of, sample, samples, why_unused
from tests.waiting import DEADLINE_S, wait_until


def test_samples_keep_order_and_labels(serve: Serve) -> None:
    epochs = 0
    with reader_of(serve("echo"), serve("echo")).set_sample_generator(samples(203)) as reader:

        def both_serve() -> bool:
            nonlocal epochs
            epochs += 1
            check(list(reader()), 203)
            return epochs > 1 and all(teacher.rows > 0 for teacher in reader.stats().teachers.values())

        wait_until(both_serve)
        stats = reader.stats()
    assert stats.rows_asked == stats.rows_received == stats.rows_delivered == 203 * epochs
    assert stats.rows_resent == 0
    assert len(stats.teachers) == 2
    assert sum(teacher.rows for teacher in stats.teachers.values()) == 203 * epochs


def test_sample_lists_keep_their_lengths(serve: Serve) -> None:
    def source() -> Iterator[Any]:
        numbers = itertools.count()
        for length in (0, 3, 1, 0, 7, 2, 10, 0):
            yield [sample(next(numbers)) for _ in range(length)]

    with reader_of(serve("echo")).set_sample_list_generator(source) as reader:
        lists = list(reader())
    assert [len(samples) for samples in lists] == [0, 3, 1, 0, 7, 2, 10, 0]
    check([row for samples in lists for row in samples], 23)


def test_unknown_names_are_not_sent(serve: Serve) -> None:
    """Names that the model does not have."""
    reader = DistillReader(["x", "label"], ["y"], teachers=[serve("echo").endpoint])
    with reader.set_sample_generator(samples(5)):
        check(list(reader()), 5)


def test_break_leaves_the_next_epoch_whole(serve: Serve) -> None:
    with reader_of(serve("echo")).set_sample_generator(samples(300)) as reader:
        for _ in range(3):
            for row in reader():
                if row[1] == 17:
                    break
        unfinished = reader()
        next(unfinished)
        check(list(reader()), 300)
        with pytest.raises(ClosedError, match="another one was started"):
            next(unfinished)


def test_ensembles_are_averaged_and_weighted(serve: Serve) -> None:
    one, three = serve("echo"), serve("echo", scale=3.0)
    groups = [Teachers(endpoints=(one.endpoint,), weight=3.0), Teachers(endpoints=(three.endpoint,), weight=1.0)]

    def rows(combine: Any) -> list[Any]:
        with DistillReader(["x", None], ["y"], teachers=groups, combine=combine, teacher_batch_size=4) as reader:
            return list(reader.set_sample_generator(samples(20))())

    for _, number, first, second in rows("each"):
        assert (first[0], second[0]) == (number, 3 * number)
    for _, number, label in rows("mean"):
        assert label[0] == pytest.approx(0.75 * number + 0.25 * 3 * number)
    for _, number, label in rows(lambda outputs: np.maximum(*outputs)):
        assert label[0] == 3 * number


class OneIterator:
    """Gives itself at each `iter`, starting afresh, as a `DataLoader` with persistent workers does."""

    def __init__(self) -> None:
        self.busy, self.go = threading.Event(), threading.Event()
        self.begun = 0

    def __iter__(self) -> OneIterator:
        self.begun += 1
        self._samples = samples(6)()
        return self

    def __next__(self) -> Any:
        found = next(self._samples)
        if found[1] == 3 and not self.go.is_set():
            self.busy.set()
            assert self.go.wait(DEADLINE_S)
        return found


def test_busy_source_is_an_error_in_time(serve: Serve) -> None:
    """The error names the setting, and the next epoch is whole."""
    source = OneIterator()
    reader = reader_of(serve("echo"), teacher_batch_size=1, options=Options(source_timeout_s=0.1))
    with reader.set_sample_generator(lambda: source):
        next(reader())
        assert source.busy.wait(DEADLINE_S)
        with pytest.raises(TemporaryError, match="source_timeout_s"):
            reader()
        assert source.begun == 1
        source.go.set()
        wait_until(lambda: "edl-feed" not in {thread.name for thread in threading.enumerate()})
        check(list(reader()), 6)
        assert source.begun == 2


def test_source_starts_no_epoch_of_its_reader(serve: Serve) -> None:
    reader = reader_of(serve("echo"))

    def source() -> Iterator[Any]:
        yield sample(0)
        yield from reader()

    with reader.set_sample_generator(source), pytest.raises(ClosedError, match="epoch of that reader"):
        list(reader())


def test_missing_names_are_named(serve: Serve) -> None:
    """Outputs and inputs that the model lacks, and rows of a wrong shape or type."""
    teacher = serve("echo")
    why_unused(
        DistillReader(["x"], ["z"], teachers=[teacher.endpoint]).set_sample_generator(samples(3)), "no output 'z'"
    )
    reader = DistillReader(["w"], ["y"], teachers=[teacher.endpoint])
    with reader.set_sample_generator(samples(3)), pytest.raises(SourceError, match=r"wants input 'x'.*'w'"):
        list(reader())
    for row, words in (
        (np.zeros(WIDTH + 1, np.float32), r"rows of shape \[5\].*wants \[4\]"),
        (np.array(["a"] * WIDTH), "wants FP32"),
    ):
        with (
            reader_of(teacher).set_sample_generator(lambda row=row: iter([(row, 0)])) as reader,  # type: ignore[misc]
            pytest.raises(SourceError, match=words),
        ):
            list(reader())


def test_empty_source_is_named(serve: Serve) -> None:
    """A source that gives nothing to go through."""

    def forgot_to_return() -> Any:
        samples(3)

    teacher = serve("echo")
    with (
        reader_of(teacher).set_batch_generator(forgot_to_return) as reader,
        pytest.raises(SourceError, match="the data source returned None: it must return an iterable"),
    ):
        reader()
    with (
        reader_of(teacher).set_sample_list_generator(lambda: [[sample(0)], None]) as reader,
        pytest.raises(SourceError, match="after 1 samples the source yielded NoneType, which is no list"),
    ):
        list(reader())


def test_settings_are_checked_and_named() -> None:
    with pytest.raises(SettingsError, match="ins="):
        DistillReader([None], ["y"])
    with pytest.raises(SettingsError, match="teacher_batch_size=0"):
        DistillReader(["x"], ["y"], teacher_batch_size=0)
    with pytest.raises(SettingsError, match="expected host:port"):
        DistillReader(["x"], ["y"]).set_fixed_teacher("localhost")
    reader = DistillReader(["x"], ["y"]).set_sample_generator(samples(1))
    with pytest.raises(SettingsError, match="set already"):
        reader.set_batch_generator(samples(1))
    with pytest.raises(SettingsError, match="not the iterator"):
        DistillReader(["x"], ["y"]).set_sample_generator(iter([]))  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="EDL_SERVICE"):
        reader()
    with pytest.raises(SettingsError, match="no data source"):
        DistillReader(["x"], ["y"], teachers="s")()


def test_ancestors_environment_is_understood(
    serve: Serve, register: Register, registry_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a note for each name, at the user's own line, so that Python's default filters show it."""
    register(serve("echo").endpoint, "old")
    monkeypatch.setenv("PADDLE_DISTILL_BALANCE_SERVER", registry_url)
    monkeypatch.setenv("PADDLE_DISTILL_SERVICE_NAME", "old")
    monkeypatch.setenv("PADDLE_DISTILL_MAX_TEACHER", "4")
    reader = DistillReader(["x", None], ["y"]).set_sample_generator(samples(20))
    with warnings.catch_warnings(record=True) as noted, reader:
        warnings.simplefilter("always")
        check(list(reader()), 20)
    assert {note.filename for note in noted if note.category is FutureWarning} == {__file__}
    notes = [str(note.message) for note in noted if note.category is FutureWarning]
    assert [note.split(": ")[1] for note in notes] == [
        "set EDL_DISCOVERY instead",
        "set EDL_SERVICE instead",
        "set EDL_MAX_TEACHERS instead",
    ]


def test_print_config_shows_what_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    DistillReader(["x", None], ["y"]).set_dynamic_teacher("consul://c:8500", "s", 3).print_config()
    shown = capsys.readouterr().out
    for words in ("ins: ['x', None]", "predicts: ['y']", "consul://c:8500", "teachers: s"):
        assert words in shown
