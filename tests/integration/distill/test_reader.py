"""`DistillReader` against real teacher processes: order, exactly once, and teachers that come, go and misbehave."""

from __future__ import annotations

import gc
import itertools
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options, Teachers
from edl.distill.compress import TopK
from edl.errors import BadOutputError, ClosedError, NoTeacherError, RejectedError, SettingsError, SourceError
from tests.integration.distill.conftest import Start, until

WIDTH = 4


def sample(number: int) -> tuple[np.ndarray, int]:
    return np.full(WIDTH, number, np.float32), number


def samples(count: int, pause_s: float = 0.0) -> Callable[[], Iterator[Any]]:
    def source() -> Iterator[Any]:
        for number in range(count):
            if pause_s:
                time.sleep(pause_s)
            yield sample(number)

    return source


def check(delivered: list[tuple[Any, ...]], count: int) -> None:
    """In order, each once, each with its own label."""
    assert [number for _, number, *_ in delivered] == list(range(count))
    for x, number, label in delivered:
        assert x[0] == number
        assert label[0] == number


def reader_of(*teachers: Any, **kwargs: Any) -> DistillReader:
    kwargs.setdefault("options", Options(teacher_timeout_s=20))
    kwargs.setdefault("teacher_batch_size", 4)
    endpoints = [teacher.endpoint for teacher in teachers]
    return DistillReader(["x", None], ["y"], teachers=endpoints, **kwargs)


def test_samples_come_back_in_order_with_their_own_labels(start: Start) -> None:
    with reader_of(start("echo"), start("echo")).set_sample_generator(samples(203)) as reader:
        check(list(reader()), 203)
        check(list(reader()), 203)
        stats = reader.stats()
    assert stats.rows_asked == stats.rows_received == stats.rows_delivered == 2 * 203
    assert stats.rows_resent == 0
    assert sum(teacher.rows for teacher in stats.teachers.values()) == 2 * 203
    assert all(teacher.rows > 0 for teacher in stats.teachers.values())


def test_sample_lists_keep_their_lengths(start: Start) -> None:
    def source() -> Iterator[Any]:
        numbers = itertools.count()
        for length in (0, 3, 1, 0, 7, 2, 10, 0):
            yield [sample(next(numbers)) for _ in range(length)]

    with reader_of(start("echo")).set_sample_list_generator(source) as reader:
        lists = list(reader())
    assert [len(samples) for samples in lists] == [0, 3, 1, 0, 7, 2, 10, 0]
    check([row for samples in lists for row in samples], 23)


@pytest.mark.parametrize("rows", [1, 4, 32])
def test_each_sample_has_a_top_k_of_its_own(start: Start, rows: int) -> None:
    def source() -> Iterator[Any]:
        yield from ((np.roll(np.arange(WIDTH, dtype=np.float32), number), number) for number in range(10))

    def lists() -> Iterator[Any]:
        both = list(source())
        yield from (both[:3], both[3:])

    for kwargs in ({"top_k": 2}, {"top_k": 2, "dtype": "float16", "temperature": 4.0}):
        with reader_of(start("echo"), teacher_batch_size=rows, **kwargs) as reader:
            found = list(reader.set_sample_generator(source)())
        with reader_of(start("echo"), teacher_batch_size=rows, **kwargs) as reader:
            found += [row for some in reader.set_sample_list_generator(lists)() for row in some]
        assert [number for _, number, _ in found] == [*range(10)] * 2
        for x, _, label in found:
            assert label.ids.tolist() == np.argsort(-x)[:2].tolist()
            assert label.values.tolist() == [3, 2]
            assert label.tail_lse.shape == ()
        assert TopK.stack([label for *_, label in found]).ids.shape == (20, 2)


def test_batches_are_arrays_and_other_fields_pass_through(start: Start) -> None:
    def source() -> Iterator[Any]:
        for first in range(0, 40, 10):
            numbers = np.arange(first, first + 10)
            yield np.repeat(numbers[:, None], WIDTH, 1).astype(np.float32), numbers, {"meta": first}

    with reader_of(start("echo")).set_batch_generator(source) as reader:
        batches = list(reader())
    assert [meta["meta"] for _, _, meta, _ in batches] == [0, 10, 20, 30]
    for x, numbers, _, labels in batches:
        assert labels.shape[0] == 10
        assert labels.flags.writeable
        assert (labels[:, 0] == numbers).all()
        assert (x[:, 0] == numbers).all()


def test_names_that_the_model_does_not_have_are_not_sent(start: Start) -> None:
    reader = DistillReader(["x", "label"], ["y"], teachers=[start("echo").endpoint])
    with reader.set_sample_generator(samples(5)):
        check(list(reader()), 5)


def test_a_killed_teacher_loses_nothing_and_repeats_nothing(start: Start) -> None:
    teachers = [start("echo", delay_s=0.01) for _ in range(3)]
    delivered = []
    with reader_of(*teachers).set_sample_generator(samples(600)) as reader:
        for row in reader():
            delivered.append(row)
            if len(delivered) == 100:
                teachers[0].kill()
        stats = reader.stats()
    check(delivered, 600)
    assert stats.rows_resent <= 4 * 32, "no more than it had in flight"
    assert stats.rows_asked == 600


def test_a_teacher_that_appears_is_used_within_a_second_and_one_that_drains_costs_nothing(
    start: Start, registry_url: str
) -> None:
    first = start("echo", service="s", discovery=registry_url, delay_s=0.005)
    reader = DistillReader(["x", None], ["y"], teacher_batch_size=1, options=Options(teacher_timeout_s=20))
    reader.set_dynamic_teacher(registry_url, "s").set_sample_generator(samples(4000))
    with reader:
        rows = reader()
        delivered = list(itertools.islice(rows, 20))
        second = start("echo", service="s", discovery=registry_url, delay_s=0.005)
        registered = time.monotonic()

        def second_serves() -> bool:
            delivered.append(next(rows))
            return sum(teacher.rows > 0 for teacher in reader.stats().teachers.values()) == 2

        until(second_serves, 10)
        assert time.monotonic() - registered < 5, "a second on an idle machine; five leaves room for a busy one"
        first.terminate()
        delivered += itertools.islice(rows, 200)
        assert first.wait(20) == 0
        failures = sum(teacher.failures for teacher in reader.stats().teachers.values())
        delivered += rows
    check(delivered, 4000)
    assert failures == 0, "a drained teacher leaves discovery before it stops taking requests"
    assert second.is_alive()


def test_breaking_out_of_an_epoch_leaves_the_next_one_whole(start: Start) -> None:
    with reader_of(start("echo")).set_sample_generator(samples(500)) as reader:
        for _ in range(5):
            for row in reader():
                if row[1] == 17:
                    break
        unfinished = reader()
        next(unfinished)
        check(list(reader()), 500)
        with pytest.raises(ClosedError, match="another one was started"):
            next(unfinished)


def test_two_readers_use_their_own_teachers(start: Start) -> None:
    plain, doubled = start("echo"), start("echo", scale=2.0)
    with (
        reader_of(plain).set_sample_generator(samples(50)) as first,
        reader_of(doubled).set_sample_generator(samples(50)) as second,
    ):
        for one, two in zip(first(), second(), strict=True):
            assert two[2][0] == 2 * one[2][0] == 2 * one[1]


def test_no_teacher_is_an_error_that_says_who_was_tried(registry_url: str) -> None:
    options = Options(teacher_timeout_s=0.7)
    reader = DistillReader(["x", None], ["y"], teachers="127.0.0.1:9", options=options)
    with reader.set_sample_generator(samples(5)), pytest.raises(NoTeacherError, match=r"127\.0\.0\.1:9.*within 0\.7 s"):
        list(reader())
    reader = DistillReader(["x", None], ["y"], options=options).set_dynamic_teacher(registry_url, "nobody")
    with (
        reader.set_sample_generator(samples(5)),
        pytest.raises(
            NoTeacherError, match=rf"in {re.escape(registry_url)} .*none is registered: `edl teachers` lists"
        ),
    ):
        list(reader())


def test_losing_every_teacher_is_an_error_in_the_middle_too(start: Start) -> None:
    teacher = start("echo", delay_s=0.01)
    with reader_of(teacher, options=Options(teacher_timeout_s=1)).set_sample_generator(samples(1000)) as reader:
        rows = reader()
        next(rows)
        teacher.kill()
        with pytest.raises(NoTeacherError):
            list(rows)


def test_a_teacher_that_comes_back_is_used_again(start: Start) -> None:
    teacher = start("echo", delay_s=0.01)
    with reader_of(teacher).set_sample_generator(samples(300)) as reader:
        rows = reader()
        delivered = [next(rows)]
        teacher.kill()
        again = threading.Timer(0.5, lambda: start("echo", port=teacher.port, delay_s=0.01))
        again.start()
        delivered += rows
        again.join()
    check(delivered, 300)


def test_a_paused_teacher_is_worked_around(start: Start) -> None:
    teachers = [start("echo", delay_s=0.01) for _ in range(3)]
    delivered = []
    with reader_of(*teachers).set_sample_generator(samples(400)) as reader:
        for row in reader():
            delivered.append(row)
            if len(delivered) == 100:
                teachers[0].pause()
        teachers[0].resume()
    check(delivered, 400)


@pytest.mark.slow
def test_the_only_teacher_is_missed_soon_when_it_is_paused(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Its connection stays, as with a machine that vanishes: what is said first is that it does not answer."""
    teacher = start("echo", delay_s=0.01)
    with reader_of(teacher, options=Options(teacher_timeout_s=2)).set_sample_generator(samples(5000)) as reader:
        rows = reader()
        next(rows)
        teacher.pause()
        began = time.monotonic()
        with pytest.raises(NoTeacherError, match="ping timeout"):
            list(rows)
        assert time.monotonic() - began < 40, "not a minute, gRPC's own patience"
        teacher.resume()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    first = next(number for number, line in enumerate(said) if "has answered for 5 s: still waiting" in line)
    assert first < next(number for number, line in enumerate(said) if "no live teacher" in line)


@pytest.mark.slow
def test_a_teacher_that_computes_for_longer_than_a_ping_may_take_is_not_missed(start: Start) -> None:
    teacher = start("echo", delay_s=22)
    options = Options(teacher_timeout_s=2)
    with reader_of(teacher, options=options).set_sample_generator(samples(4)) as reader:
        check(list(reader()), 4)
        assert reader.stats().rows_resent == 0


def test_a_full_queue_is_waited_for(start: Start) -> None:
    teacher = start("echo", delay_s=0.005, max_batch=4, max_queue=8)
    readers = [reader_of(teacher, teacher_batch_size=4).set_sample_generator(samples(120)) for _ in range(3)]
    found: list[list[Any]] = [[] for _ in readers]
    threads = [
        threading.Thread(target=lambda index=index, reader=reader: found[index].extend(reader()))  # type: ignore[misc]
        for index, reader in enumerate(readers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rows, reader in zip(found, readers, strict=True):
        check(rows, 120)
        reader.close()


@pytest.mark.parametrize("fault", ["nan", "raises"])
def test_a_teacher_with_unusable_answers_is_set_aside_and_the_rest_go_on(start: Start, fault: str) -> None:
    good, bad = start("echo"), start(fault)
    with reader_of(good, bad).set_sample_generator(samples(100)) as reader:
        check(list(reader()), 100)
        stats = reader.stats()
    assert sum(teacher.failures for teacher in stats.teachers.values()) > 0 or stats.teachers_live == 1
    assert stats.teachers[bad.endpoint].rows == 0


def test_a_teacher_that_answers_in_another_shape_than_those_before_it_is_set_aside(
    start: Start, registry_url: str
) -> None:
    start("echo", service="s", discovery=registry_url, delay_s=0.002)
    reader = DistillReader(["x", None], ["y"], teacher_batch_size=4).set_sample_generator(samples(20_000))
    with reader.set_dynamic_teacher(registry_url, "s"):
        rows = reader()
        delivered = [next(rows)]
        start("wrong_width", service="s", discovery=registry_url)

        def noticed() -> bool:
            delivered.append(next(rows))
            return any("rows of shape [8]" in teacher.why for teacher in reader.stats().teachers.values())

        until(noticed, 10)
        delivered += itertools.islice(rows, 200)
    check(delivered, len(delivered))
    assert all(len(label) == WIDTH for *_, label in delivered)


def test_an_input_that_no_teacher_can_label_is_an_error_not_a_hang(start: Start) -> None:
    with (
        reader_of(start("raises"), start("raises")).set_sample_generator(samples(20)) as reader,
        pytest.raises((BadOutputError, RejectedError), match="no teacher could label"),
    ):
        list(reader())


def test_outputs_and_inputs_that_the_model_lacks_are_named(start: Start) -> None:
    teacher = start("echo")
    reader = DistillReader(["x"], ["z"], teachers=[teacher.endpoint], options=Options(teacher_timeout_s=1))
    with reader.set_sample_generator(samples(3)), pytest.raises(NoTeacherError, match="no output 'z'"):
        list(reader())
    reader = DistillReader(["w"], ["y"], teachers=[teacher.endpoint])
    with reader.set_sample_generator(samples(3)), pytest.raises(SourceError, match=r"wants input 'x'.*'w'"):
        list(reader())


def test_rows_of_a_wrong_shape_or_type_are_named(start: Start) -> None:
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


def test_the_sources_error_comes_behind_what_it_yielded(start: Start) -> None:
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


def test_a_source_that_gives_nothing_to_go_through_is_named(start: Start) -> None:
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


def test_strings_that_are_no_text_are_named_with_their_input(start: Start, tmp_path: Path) -> None:
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


def test_ensembles_side_by_side_averaged_and_weighted(start: Start) -> None:
    one, three = start("echo"), start("echo", scale=3.0)
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


def test_top_k_and_float16_are_delivered_as_asked(start: Start) -> None:
    teacher = start("linear")
    reader = DistillReader(["x", None], ["y"], teachers=[teacher.endpoint], top_k=3, temperature=2.0, dtype="float16")
    with reader.set_batch_generator(lambda: iter([(np.random.rand(6, WIDTH).astype(np.float32), None)])):
        ((_, _, top),) = list(reader())
    assert top.ids.shape == (6, 3)
    assert top.values.dtype == np.float16
    whole = DistillReader(["x", None], ["y"], teachers=[teacher.endpoint])
    x = np.random.rand(6, WIDTH).astype(np.float32)
    with whole.set_batch_generator(lambda: iter([(x, None)])):
        ((_, _, logits),) = list(whole())
    reader = DistillReader(["x", None], ["y"], teachers=[teacher.endpoint], top_k=3)
    with reader.set_batch_generator(lambda: iter([(x, None)])):
        ((_, _, top),) = list(reader())
    np.testing.assert_array_equal(top.ids, np.argsort(-logits, axis=1)[:, :3])


@pytest.mark.parametrize("shared_memory", [True, False])
def test_shared_memory_and_plain_grpc_give_the_same(start: Start, shared_memory: bool) -> None:
    options = Options(shared_memory=shared_memory, teacher_timeout_s=20)
    with reader_of(start("echo"), options=options).set_sample_generator(samples(300)) as reader:
        check(list(reader()), 300)
        arena = reader._labeller._arena  # type: ignore[union-attr]
        assert (arena is not None and bool(arena._regions)) == shared_memory


def test_nothing_is_left_behind_by_close_or_by_letting_go(start: Start) -> None:
    teacher = start("echo")

    def left() -> tuple[int, list[str], int]:
        gc.collect()
        arenas = [path.name for path in Path("/dev/shm").glob(f"edl-arena-{os.getpid()}-*")]
        sockets = sum("socket:" in target(path) for path in Path("/proc/self/fd").iterdir())
        return len([t for t in threading.enumerate() if t.name != "MainThread"]), arenas, sockets

    before = left()
    reader = reader_of(teacher).set_sample_generator(samples(200))
    rows = reader()
    next(rows)
    reader.close()
    with pytest.raises(ClosedError):
        next(rows)
    with pytest.raises(ClosedError):
        reader()
    reader.close()
    del rows, reader
    until(lambda: left() == before, 10)

    reader = reader_of(teacher).set_sample_generator(samples(200))
    next(reader())
    del reader
    until(lambda: left() == before, 10)


def target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def test_a_forked_child_is_refused_with_words(start: Start) -> None:
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


def test_the_ancestors_environment_is_understood_with_a_note(
    start: Start, registry_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_note_about_old_names_is_seen_with_pythons_own_filters(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_two_students_with_one_teacher_each_share_two_teachers_out(start: Start, registry_url: str) -> None:
    for _ in range(2):
        start("echo", service="shared", discovery=registry_url, delay_s=0.005)

    def student() -> DistillReader:
        reader = DistillReader(["x", None], ["y"], teacher_batch_size=2, options=Options(teacher_timeout_s=20))
        return reader.set_dynamic_teacher(registry_url, "shared", 1).set_sample_generator(samples(3000))

    def users(reader: DistillReader) -> set[str]:
        return {name for name, teacher in reader.stats().teachers.items() if teacher.state == "ready"}

    with student() as first, student() as second:
        pairs = zip(first(), second(), strict=True)
        next(pairs)

        def apart() -> bool:
            next(pairs)
            one, two = users(first), users(second)
            return len(one) == len(two) == 1 and one != two

        until(apart, 15)
