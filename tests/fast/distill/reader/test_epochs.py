"""`DistillReader` with real teachers: order, each sample once with its own labels, whatever source and teachers do."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Teachers
from edl.errors import ClosedError, SourceError
from tests.fast.distill.conftest import Register, Serve
from tests.fast.distill.reading import WIDTH, check, reader_of, sample, samples
from tests.waiting import DEADLINE_S


def test_break_leaves_the_next_epoch_whole(serve: Serve) -> None:
    with reader_of(serve("echo")).set_sample_generator(samples(300)) as reader:
        for _ in range(3):
            for row in reader():
                if row[1] == 17:
                    break
        unfinished = reader()
        next(unfinished)
        check(list(reader()), 300)
        with pytest.raises(ClosedError, match="a new one was started"):
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
    for *_, label in rows("mean_probabilities"):
        assert np.exp(label) == pytest.approx([0.25] * WIDTH), "softmax of equal logits"
    for _, number, label in rows(lambda outputs: np.maximum(*outputs)):
        assert label[0] == 3 * number


def test_missing_names_are_named(serve: Serve) -> None:
    """Inputs that the model lacks, and rows of a wrong shape or type; unknown inputs are not sent."""
    teacher = serve("echo")
    with DistillReader(["x", "unknown"], ["y"], teachers=[teacher.endpoint]).set_sample_generator(samples(5)) as reader:
        check(list(reader()), 5)
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
        pytest.raises(SourceError, match="after 1 samples the source yielded NoneType, which is not a list"),
    ):
        list(reader())


def test_a_loop_may_work_in_place(serve: Serve) -> None:
    images = np.ones((12, WIDTH), np.float32)
    with reader_of(serve("echo")) as reader:
        for x, _, y in reader.set_batch_generator(lambda: ((images[at : at + 2], 0) for at in range(0, 12, 2)))():
            assert y.tolist() == [[1.0] * WIDTH] * 2
            x += 7


def test_buffer_filled_in_use_is_noticed(serve: Serve) -> None:
    """The training loop waits for the source, so each item is delivered before the next one is filled in."""
    loop_has_it, filled = threading.Semaphore(0), threading.Semaphore(0)

    def source() -> Iterator[Any]:
        buffer = np.zeros((4, WIDTH), np.float32)
        for number in range(5):
            if number:
                loop_has_it.acquire(timeout=DEADLINE_S)
            buffer[:] = number
            yield buffer, 0
            filled.release()

    used = []

    def use(item: Any) -> None:
        loop_has_it.release()
        assert filled.acquire(timeout=DEADLINE_S)
        used.append(item)

    with reader_of(serve("echo")) as reader, pytest.raises(SourceError, match="or while it was in use"):
        list(map(use, reader.set_batch_generator(source)()))
    assert len(used) <= 2


def test_error_of_sending_reaches_the_loop(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> int:
        raise OSError("no space")

    with reader_of(serve("echo")) as reader:
        monkeypatch.setattr("edl.distill.pipeline.chunk_labeller.ChunkLabeller.submit", failing)
        with pytest.raises(OSError, match="no space"):
            list(reader.set_sample_generator(samples(3))())


def test_closed_while_the_source_is_silent(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl.distill.pipeline.session._SOURCE_STOP_S", 0.01)
    delivered, gone = threading.Event(), threading.Event()

    def source() -> Iterator[Any]:
        yield sample(0)
        assert delivered.wait(DEADLINE_S), "a request that is not full is sent when the source is silent"
        gone.wait(DEADLINE_S)

    def take(rows: Iterator[Any]) -> None:
        for _ in rows:
            delivered.set()

    reader = reader_of(serve("echo"), teacher_batch_size=32).set_sample_generator(source)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(take, reader())
        assert delivered.wait(DEADLINE_S)
        reader.close()
        assert isinstance(taking.exception(DEADLINE_S), ClosedError)
        gone.set()


def test_ancestors_environment_is_understood(
    serve: Serve, register: Register, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a note for each name, at the user's own line, so that Python's default filters show it."""
    register(serve("echo").endpoint, "old")
    monkeypatch.setenv("PADDLE_DISTILL_BALANCE_SERVER", url)
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


FORKS = """
import multiprocessing, os, sys, warnings

import numpy as np

from edl.distill import DistillReader, Options
from edl.distill.cache import SoftLabelCache

warnings.simplefilter("ignore")  # Python's own, of forks beside threads

def source():
    return ((np.full(4, number, np.float32), number) for number in range(20))

def reader(**arguments):
    arguments = {"teachers": sys.argv[1], "options": Options(teacher_timeout_s=600)} | arguments
    return DistillReader(["x", None], ["y"], **arguments).set_sample_generator(source)

def use(made=None, **arguments):
    with made or reader(**arguments) as labelled:
        for epoch in range(2):
            assert [number for _, number, _ in labelled()] == list(range(20))
    print("labelled", flush=True)

def in_a_fork(function):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            function()
        except BaseException as exc:
            print(type(exc).__name__, exc, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

made = reader()  # but not used: it connects with its first epoch
in_a_fork(lambda: use(made))
in_a_fork(use)
with SoftLabelCache(path="labels") as cache:
    use(cache=cache, id_field=1)
    print("from here on", flush=True)

def offline():
    with SoftLabelCache(path="labels") as cache:
        use(reader(teachers=None, cache=cache, id_field=1))

in_a_fork(offline)
in_a_fork(use)  # the parent's is closed
in_a_fork(lambda: use(made))
still = reader()
rows = still()
next(rows)
in_a_fork(use)  # the parent's is at work
in_a_fork(lambda: next(rows))
in_a_fork(still)
process = multiprocessing.get_context("fork").Process(target=in_a_fork, args=(use,))
process.start()
process.join()  # a grandchild
assert len(list(rows)) == 19
still.close()
use()
"""


def test_forked_children(tmp_path: Path, serve: Serve) -> None:
    """Children of a process without a reader have their own; later ones are refused, unless a cache has all labels."""
    file = tmp_path / "program.py"
    file.write_text(FORKS)
    command = [sys.executable, str(file), serve("echo").endpoint]
    ended = subprocess.run(command, cwd=tmp_path, timeout=100, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    here = lines.index("from here on")
    assert lines[:here] == ["labelled"] * 3
    first, *refused, last = lines[here + 1 :]
    assert (first, last) == ("labelled", "labelled")
    assert len(refused) == 6
    assert all(line.startswith("ClosedError") and '"spawn"' in line for line in refused), refused
    assert sum("this reader belongs to process" in line for line in refused) == 2
    assert sum("a reader cannot connect" in line and '"forkserver"' in line for line in refused) == 4
