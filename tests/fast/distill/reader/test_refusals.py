"""What `DistillReader` refuses and what it says: inputs, sources, settings, old names."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader
from edl.errors import SettingsError, SourceError
from tests.fast.distill.conftest import Register, Serve
from tests.fast.distill.reading import WIDTH, check, reader_of, sample, samples, why_unused


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


def test_source_error_comes_after_its_items(serve: Serve) -> None:
    def source() -> Iterator[Any]:
        yield from (sample(number) for number in range(10))
        raise KeyError("the disk is gone")

    with reader_of(serve("echo"), teacher_batch_size=5).set_sample_generator(source) as reader:
        rows = reader()
        check(list(itertools.islice(rows, 10)), 10)
        with pytest.raises(KeyError, match="the disk is gone"):
            next(rows)


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
