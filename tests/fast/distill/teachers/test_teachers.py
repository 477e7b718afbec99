"""`DistillReader` and its teachers, real processes: they come, go, are paused and misbehave."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from edl.discovery import Instance, open_registry
from edl.distill import DistillReader, Options
from edl.distill.dispatch.policy import Policy
from edl.distill.transport.client import _OPTIONS
from edl.errors import BadOutputError, NoTeacherError
from edl.protocol import names
from edl.protocol.transport import grpc
from edl.testing import LocalTeacher
from tests.fast.distill.conftest import Start, until
from tests.fast.distill.reading import WIDTH, check, reader_of, samples
from tests.plugins_consul import free_ports


def test_killed_teacher_loses_nothing(start: Start) -> None:
    """A killed teacher loses nothing and repeats nothing."""
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


def test_appearing_and_draining_teachers(start: Start, registry_url: str) -> None:
    """A teacher that appears is used within a second and one that drains costs nothing."""
    first = start("echo", service="s", discovery=registry_url, delay_s=0.005, serve={"linger": "2s"})
    reader = DistillReader(["x", None], ["y"], teacher_batch_size=1, options=Options(teacher_timeout_s=60))
    reader.set_dynamic_teacher(registry_url, "s").set_sample_generator(samples(4000))
    with reader:
        rows = reader()
        delivered = list(itertools.islice(rows, 20))
        second = start("echo", service="s", discovery=registry_url, delay_s=0.005)

        def second_serves() -> bool:
            delivered.append(next(rows))
            return sum(teacher.rows > 0 for teacher in reader.stats().teachers.values()) == 2

        until(second_serves, 30)  # a second on an idle machine
        first.terminate()
        delivered += itertools.islice(rows, 200)
        assert first.wait(20) == 0
        failures = sum(teacher.failures for teacher in reader.stats().teachers.values())
        delivered += rows
    check(delivered, 4000)
    assert failures == 0, "a drained teacher leaves discovery before it stops taking requests"
    assert second.is_alive()


def test_no_teacher_error_names_tried_ones(registry_url: str) -> None:
    """No teacher is an error that says who was tried."""
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


def test_losing_every_teacher_is_an_error(start: Start) -> None:
    """Losing every teacher is an error in the middle too."""
    teacher = start("echo", delay_s=0.01)
    with reader_of(teacher, options=Options(teacher_timeout_s=3)).set_sample_generator(samples(1000)) as reader:
        rows = reader()
        next(rows)
        teacher.kill()
        with pytest.raises(NoTeacherError):
            list(rows)


def test_returning_teacher_is_used(start: Start) -> None:
    """A teacher that comes back is used again."""
    teacher = start("echo", port=free_ports(1)[0], delay_s=0.01)
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


def pings_every(monkeypatch: pytest.MonkeyPatch, s: int, keepalive_timeout_s: int, ping_timeout_s: int) -> None:
    """Connections that notice a silent teacher sooner than a user's do, whose pings are 20 s apart."""
    sooner = {
        "grpc.keepalive_time_ms": 1000 * s,
        "grpc.keepalive_timeout_ms": 1000 * keepalive_timeout_s,
        "grpc.http2.ping_timeout_ms": 1000 * ping_timeout_s,
    }
    assert sooner.keys() <= dict(_OPTIONS).keys()
    sooner["grpc.http2.max_pings_without_data"] = 0  # no limit: by default it soon sends one a minute
    monkeypatch.setattr("edl.distill.transport.client._OPTIONS", [*(dict(_OPTIONS) | sooner).items()])


@pytest.mark.slow
def test_paused_only_teacher_is_missed(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection stays, as with a machine that vanishes: what is said first is that it does not answer."""
    pings_every(monkeypatch, 6, keepalive_timeout_s=2, ping_timeout_s=8)
    teacher = start("echo", delay_s=0.01)
    with reader_of(teacher, options=Options(teacher_timeout_s=3)).set_sample_generator(samples(5000)) as reader:
        rows = reader()
        next(rows)
        teacher.pause()
        began = time.monotonic()
        with pytest.raises(NoTeacherError, match="ping timeout"):
            list(rows)
        assert time.monotonic() - began < 40, "not a minute, gRPC's own patience"
        teacher.resume()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    first = next(
        number for number, line in enumerate(said) if re.search(r"has answered for \d+ s: still waiting", line)
    )
    assert first < next(number for number, line in enumerate(said) if "no live teacher" in line)


@pytest.mark.slow
def test_slow_computation_is_not_missed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A teacher that computes for longer than a ping may take is not missed."""
    pings_every(monkeypatch, 1, keepalive_timeout_s=3, ping_timeout_s=3)
    teacher = start("echo", delay_s=6)
    options = Options(teacher_timeout_s=3)
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


def failed_in_an_epoch(reader: DistillReader, teacher: LocalTeacher) -> bool:
    """Whether the teacher was asked in vain by the end of another epoch, in which nothing is missing."""
    check(list(reader()), 100)
    return reader.stats().teachers[teacher.endpoint].failures > 0


@pytest.mark.parametrize("fault", ["nan", "raises"])
def test_unusable_answers_set_teacher_aside(start: Start, fault: str) -> None:
    """A teacher with unusable answers is set aside and the rest go on."""
    good, bad = start("echo"), start(fault)
    with reader_of(good, bad).set_sample_generator(samples(100)) as reader:
        until(lambda: failed_in_an_epoch(reader, bad), 30)
        assert reader.stats().teachers[bad.endpoint].rows == 0


@pytest.mark.parametrize("fault", ["nan", "raises"])
def test_unable_first_teacher_is_waited_past(start: Start, fault: str) -> None:
    """What the first teacher to be connected cannot do waits for the others."""
    good, bad = start("echo"), start(fault)
    good.pause()
    resume = threading.Timer(1.0, good.resume)
    resume.start()
    with reader_of(good, bad).set_sample_generator(samples(100)) as reader:
        until(lambda: failed_in_an_epoch(reader, bad), 30)
    resume.join()


FAILS_ONCE = """
from edl.testing.models import Model, echo

def fails_once(**options):
    failed = []
    good = echo()
    def answer(inputs):
        if not failed:
            failed.append(True)
            raise RuntimeError("once")
        return good(inputs)
    return Model(answer, good.inputs, good.outputs, **options)
"""


def test_leaving_teacher_is_not_waited_for(
    start: Start, registry_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long an attempt to connect may take, and what another one fails at may wait for it."""
    monkeypatch.setattr("edl.distill.engine.connection._CONNECT_TIMEOUT_S", 1000.0)
    (tmp_path / "models.py").write_text(FAILS_ONCE)
    start(f"{tmp_path}/models.py:fails_once", service="s", discovery=registry_url)
    options = Options(teacher_timeout_s=2.4, policy=Policy(coming_s=1000.0, request_timeout_s=2.4))
    reader = DistillReader(["x", None], ["y"], teacher_batch_size=4, options=options).set_sample_generator(samples(20))
    with contextlib.ExitStack() as stack:
        mute = stack.enter_context(socket.create_server(("127.0.0.1", 0)))  # takes connections, and never answers
        registry = stack.enter_context(open_registry(registry_url))
        stack.enter_context(reader.set_dynamic_teacher(registry_url, "s"))
        registration = registry.register(Instance("s", "mute", *mute.getsockname()[:2]), 10.0)

        def leave() -> None:
            until(lambda: any(teacher.failures for teacher in reader.stats().teachers.values()), 20)
            registration.close()

        leaves = threading.Thread(target=leave)
        leaves.start()
        check(list(reader()), 20)
        leaves.join()


def test_other_protocol_is_set_aside(start: Start) -> None:
    """What the others fail at does not wait for one that will never be a teacher."""
    answers = {"ServerReady": grpc.unary_unary_rpc_method_handler(lambda request, context: b"\xff" * 9)}
    stranger = grpc.server(ThreadPoolExecutor(1))
    stranger.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(names.SERVICE, answers),))
    endpoint = f"127.0.0.1:{stranger.add_insecure_port('127.0.0.1:0')}"
    stranger.start()
    options = Options(teacher_timeout_s=20, policy=Policy(coming_s=1000.0))
    reader = DistillReader(["x", None], ["y"], teachers=[start("raises").endpoint, endpoint], options=options)
    with reader.set_sample_generator(samples(4)):
        with pytest.raises(BadOutputError, match="boom"):
            list(reader())
        known = reader.stats().teachers[endpoint]
    assert known.state == "set aside"
    assert known.why == f"{endpoint}: its answer to ServerReady is no message of KServe v2"
    stranger.stop(0).wait()


def test_other_shape_is_set_aside(start: Start, registry_url: str) -> None:
    """A teacher that answers in another shape than those before it is set aside."""
    start("echo", service="s", discovery=registry_url, delay_s=0.002)
    reader = DistillReader(["x", None], ["y"], teacher_batch_size=4).set_sample_generator(samples(20_000))
    with reader.set_dynamic_teacher(registry_url, "s"):
        rows = reader()
        delivered = [next(rows)]
        start("wrong_width", service="s", discovery=registry_url)

        def noticed() -> bool:
            delivered.append(next(rows))
            return any("rows of shape [8]" in teacher.why for teacher in reader.stats().teachers.values())

        until(noticed, 60)
        delivered += itertools.islice(rows, 200)
    check(delivered, len(delivered))
    assert all(len(label) == WIDTH for *_, label in delivered)


def test_two_students_share_two_teachers(start: Start, registry_url: str) -> None:
    """Two students with one teacher each share two teachers out."""
    for _ in range(2):
        start("echo", service="shared", discovery=registry_url, delay_s=0.005)

    def student() -> DistillReader:
        reader = DistillReader(["x", None], ["y"], teacher_batch_size=2, options=Options(teacher_timeout_s=60))
        return reader.set_dynamic_teacher(registry_url, "shared", 1).set_sample_generator(samples(20_000))

    def users(reader: DistillReader) -> set[str]:
        return {name for name, teacher in reader.stats().teachers.items() if teacher.state == "ready"}

    with student() as first, student() as second:
        pairs = zip(first(), second(), strict=True)
        next(pairs)

        def apart() -> bool:
            next(pairs)
            one, two = users(first), users(second)
            return len(one) == len(two) == 1 and one != two

        until(apart, 25)
