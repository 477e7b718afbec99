"""What `DistillReader` refuses and what it says: inputs, sources, settings, old names, a fork."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options
from edl.errors import BadOutputError, ClosedError, NoTeacherError, RejectedError, SettingsError, SourceError
from tests.fast.distill.conftest import Start
from tests.fast.distill.reading import WIDTH, check, reader_of, sample, samples


def test_unlabelable_input_is_an_error(start: Start) -> None:
    """An input that no teacher can label is an error not a hang."""
    with (
        reader_of(start("raises"), start("raises")).set_sample_generator(samples(20)) as reader,
        pytest.raises((BadOutputError, RejectedError), match="no teacher could label"),
    ):
        list(reader())


def test_missing_names_are_named(start: Start) -> None:
    """Outputs and inputs that the model lacks are named."""
    teacher = start("echo")
    reader = DistillReader(["x"], ["z"], teachers=[teacher.endpoint], options=Options(teacher_timeout_s=3))
    with reader.set_sample_generator(samples(3)), pytest.raises(NoTeacherError, match="no output 'z'"):
        list(reader())
    reader = DistillReader(["w"], ["y"], teachers=[teacher.endpoint])
    with reader.set_sample_generator(samples(3)), pytest.raises(SourceError, match=r"wants input 'x'.*'w'"):
        list(reader())


def test_wrong_rows_are_named(start: Start) -> None:
    """Rows of a wrong shape or type are named."""
    teacher = start("echo")
    with (
        reader_of(teacher).set_sample_generator(lambda: iter([(np.zeros(WIDTH + 1, np.float32), 0)])) as reader,
        pytest.raises(SourceError, match=r"rows of shape \[5\].*wants \[4\]"),
    ):
        list(reader())
    with (
        reader_of(teacher).set_sample_generator(lambda: iter([(np.array(["a"] * WIDTH), 0)])) as reader,
        pytest.raises(SourceError, match="wants FP32"),
    ):
        list(reader())


def test_source_error_comes_after_its_items(start: Start) -> None:
    """The sources error comes behind what it yielded."""

    def source() -> Iterator[Any]:
        yield from (sample(number) for number in range(10))
        raise KeyError("the disk is gone")

    with reader_of(start("echo"), teacher_batch_size=5).set_sample_generator(source) as reader:
        rows = reader()
        check(list(itertools.islice(rows, 10)), 10)
        with pytest.raises(KeyError, match="the disk is gone"):
            next(rows)


def test_a_buffer_filled_again_is_noticed(start: Start) -> None:
    def source() -> Iterator[Any]:
        buffer = np.zeros((8, WIDTH), np.float32)
        for number in range(200):
            buffer[:] = number
            yield buffer, number

    with (
        reader_of(start("echo", delay_s=0.01)).set_batch_generator(source) as reader,
        pytest.raises(SourceError, match=r"yield a new array each time"),
    ):
        list(reader())


def test_empty_source_is_named(start: Start) -> None:
    """A source that gives nothing to go through is named."""

    def forgot_to_return() -> Any:
        samples(3)

    teacher = start("echo")
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


def test_bad_strings_are_named(start: Start, tmp_path: Path) -> None:
    """Strings that are no text are named with their input."""
    path = tmp_path / "words.py"
    path.write_text(
        "import numpy as np\nfrom edl.testing.models import Model\n"
        "def words(**options):\n"
        "    answer = lambda inputs: {'y': np.zeros((len(inputs['x']), 4), 'f4')}\n"
        "    return Model(answer, ['x:bytes'], ['y:float32[4]'], **options)\n"
    )
    with (
        reader_of(start(f"{path}:words")).set_batch_generator(lambda: [(["good", "\ud800"], None)]) as reader,
        pytest.raises(SourceError, match=r"input 'x' has a string that is no text"),
    ):
        list(reader())


def test_forked_child_is_refused(start: Start) -> None:
    """A forked child is refused with words."""
    with reader_of(start("echo")).set_sample_generator(samples(50)) as reader:
        rows = reader()
        next(rows)
        readable, writable = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns that threads and fork do not go together: the point here
            child = os.fork()
        if child == 0:
            words = ""
            for use in (lambda: next(rows), lambda: reader(), lambda: list(reader())):
                try:
                    use()
                except ClosedError as exc:
                    words += str(exc) + "\n"
            os.write(writable, words.encode())
            os._exit(0)
        os.close(writable)
        with os.fdopen(readable) as pipe:
            words = pipe.read()
        os.waitpid(child, 0)
        assert words.count("this reader belongs to process") == words.count('"spawn"') == 3
        assert len(list(rows)) == 49, "the parent goes on"


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


def test_ancestors_environment_is_understood(start: Start, registry_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ancestors environment is understood with a note."""
    start("echo", service="old", discovery=registry_url)
    monkeypatch.setenv("PADDLE_DISTILL_BALANCE_SERVER", registry_url)
    monkeypatch.setenv("PADDLE_DISTILL_SERVICE_NAME", "old")
    monkeypatch.setenv("PADDLE_DISTILL_MAX_TEACHER", "4")
    reader = DistillReader(["x", None], ["y"]).set_sample_generator(samples(20))
    with warnings.catch_warnings(record=True) as noted, reader:
        warnings.simplefilter("always")
        check(list(reader()), 20)
    notes = [str(note.message) for note in noted if note.category is FutureWarning]
    assert [note.split(": ")[1] for note in notes] == [
        "set EDL_DISCOVERY instead",
        "set EDL_SERVICE instead",
        "set EDL_MAX_TEACHERS instead",
    ]


def test_note_is_seen_with_default_filters(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a module that the program imports, where a DeprecationWarning would not be shown either."""
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    monkeypatch.setenv("PADDLE_DISTILL_MAX_TEACHER", "4")
    monkeypatch.setenv("EDL_TEACHERS", start("echo").endpoint)
    program = """
from edl.distill import DistillReader

def train():
    reader = DistillReader(["x"], ["y"]).set_sample_generator(lambda: (([0.0, 0, 0, 0],) for _ in range(3)))
    with reader:
        assert len(list(reader())) == 3  # line 7
"""
    (tmp_path / "training.py").write_text(program)
    command = [sys.executable, "-c", "import training; training.train()"]
    ended = subprocess.run(command, cwd=tmp_path, timeout=60, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    note = r"training\.py:7: FutureWarning: PADDLE_DISTILL_MAX_TEACHER is deprecated: set EDL_MAX_TEACHERS instead"
    assert len(re.findall(note, ended.stderr)) == 1


def test_print_config_shows_what_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    DistillReader(["x", None], ["y"]).set_dynamic_teacher("consul://c:8500", "s", 3).print_config()
    shown = capsys.readouterr().out
    for words in ("ins: ['x', None]", "predicts: ['y']", "consul://c:8500", "teachers: s"):
        assert words in shown
