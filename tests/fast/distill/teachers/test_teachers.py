"""Teachers that come, go, are killed, have no room or misbehave: each sample once, in order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edl.discovery import open_registry
from edl.distill import DistillReader, Options
from edl.distill.dispatch.policy import Policy
from edl.distill.transport.client import _OPTIONS
from edl.errors import BadOutputError, NoTeacherError
from edl.protocol import names
from tests.fast.distill.conftest import Register, Serve, Start, announce_less, instance_of
from tests.fast.distill.reading import WIDTH, Held, check, reader_of, samples
from tests.fast.distill.teachers.foreign import ForeignServer
from tests.waiting import wait_until


def service_reader(registry_url: str, most: int | None = None, **settings: Any) -> DistillReader:
    settings = {"teacher_batch_size": 4, "options": Options(teacher_timeout_s=60)} | settings
    return DistillReader(["x", None], ["y"], **settings).set_dynamic_teacher(registry_url, "s", most)


def test_a_kill_and_a_pause_lose_nothing(start: Start) -> None:
    teachers = [start("echo", delay_s=0.005, wait=False) for _ in range(3)]
    for teacher in teachers:
        teacher.wait_ready()
    with reader_of(*teachers).set_sample_generator(samples(600)) as reader:
        rows = reader()
        delivered = [next(rows)]
        wait_until(lambda: reader.stats().teachers_live == 3)
        delivered += itertools.islice(rows, 100)
        teachers[0].kill()
        delivered += itertools.islice(rows, 100)
        teachers[1].pause()
        delivered += rows
        stats = reader.stats()
        teachers[1].resume()
    check(delivered, 600)
    assert stats.rows_resent <= 2 * 4 * 32, "no more than they had in flight"
    assert stats.rows_asked == 600


def test_teachers_appear_and_drain(serve: Serve, registry_url: str) -> None:
    """One that appears is used, and one that drains costs nothing."""
    first, second = serve("echo", delay_s=0.001), serve("echo", delay_s=0.001)
    with open_registry(registry_url) as registry, service_reader(registry_url, teacher_batch_size=1) as reader:
        leaving = registry.register(instance_of(first.endpoint, "s", "first"), ttl_s=600)
        rows = reader.set_sample_generator(samples(1_000_000))()
        delivered = list(itertools.islice(rows, 20))

        def pull(condition: Any) -> None:
            def pulled() -> bool:
                delivered.append(next(rows))
                return bool(condition(reader.stats().teachers))

            wait_until(pulled)

        with registry.register(instance_of(second.endpoint, "s", "second"), ttl_s=600):
            pull(lambda teachers: "second" in teachers and teachers["second"].rows)
            leaving.close()
            pull(lambda teachers: teachers["first"].state == "gone")
            first.close()
            delivered += itertools.islice(rows, 50)
            assert sum(teacher.failures for teacher in reader.stats().teachers.values()) == 0
    check(delivered, len(delivered))


@pytest.mark.parametrize("streamed", [True, False])
def test_closed_connections_requests_move(
    serve: Serve, registry_url: str, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    """An instance that moves to another address is disconnected at once, requests under way or not."""
    if not streamed:
        announce_less(monkeypatch, names.EXTENSION_STREAM)
    held = Held()
    here, there = serve(held), serve("echo")
    reader = service_reader(registry_url).set_sample_generator(samples(200))
    try:
        with (
            open_registry(registry_url) as registry,
            registry.register(instance_of(here.endpoint, "s", "moving"), ttl_s=600) as registration,
            reader,
        ):
            rows = reader()
            assert held.entered.wait(90)
            registration.update(instance_of(there.endpoint, "s", "moving"))
            check(list(rows), 200)
            stats = reader.stats()
    finally:
        held.go.set()
    assert stats.rows_resent > 0
    assert stats.rows_received == 200


def test_paused_only_teacher_is_missed(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection stays, as with a machine that vanishes: pings tell."""
    sooner = {
        "grpc.keepalive_time_ms": 1000,
        "grpc.keepalive_timeout_ms": 2000,
        "grpc.http2.ping_timeout_ms": 3000,
    }
    assert sooner.keys() <= dict(_OPTIONS).keys(), "a user's connections are pinged, less often"
    sooner["grpc.http2.max_pings_without_data"] = 0  # no limit: by default it soon sends one a minute
    monkeypatch.setattr("edl.distill.transport.client._OPTIONS", [*(dict(_OPTIONS) | sooner).items()])
    teacher = start("echo", delay_s=0.01)
    with reader_of(teacher, options=Options(teacher_timeout_s=1)).set_sample_generator(samples(5000)) as reader:
        rows = reader()
        next(rows)
        teacher.pause()
        with pytest.raises(NoTeacherError, match="ping timeout"):
            list(rows)
        teacher.resume()
    assert any("no live teacher" in record.getMessage() for record in caplog.records)


def test_other_protocol_is_set_aside(serve: Serve) -> None:
    """What the others fail at does not wait for one that will never be a teacher."""
    options = Options(teacher_timeout_s=60, policy=Policy(coming_s=1000.0))
    with (
        ForeignServer(rewrite={"ServerReady": lambda _: b"\xff" * 9}) as stranger,
        reader_of(serve("raises"), stranger, options=options).set_sample_generator(samples(4)) as reader,
    ):
        with pytest.raises(BadOutputError, match="boom"):
            list(reader())
        known = reader.stats().teachers[stranger.endpoint]
    assert known.state == "set aside"
    assert known.why == f"{stranger.endpoint}: its answer to ServerReady is no message of KServe v2"


def test_other_shape_is_set_aside(serve: Serve, register: Register, registry_url: str) -> None:
    """A teacher that answers in another shape than those before it."""
    register(serve("echo").endpoint, "s")
    with service_reader(registry_url).set_sample_generator(samples(1_000_000)) as reader:
        rows = reader()
        delivered = [next(rows)]
        register(serve("wrong_width").endpoint, "s")

        def noticed() -> bool:
            delivered.append(next(rows))
            return any("rows of shape [8]" in teacher.why for teacher in reader.stats().teachers.values())

        wait_until(noticed)
        delivered += itertools.islice(rows, 50)
    check(delivered, len(delivered))
    assert all(len(label) == WIDTH for *_, label in delivered)


# What a teacher's limits mean to students: they wait, or go elsewhere, and lose nothing.


@pytest.mark.parametrize(
    ("limit", "words"), [("streams", "streams are open"), ("connections", "clients are connected")]
)
def test_a_student_waits_for_room(serve: Serve, limit: str, words: str) -> None:
    teacher = serve("echo", delay_s=0.001, server={f"max_{limit}": 1})
    with reader_of(teacher) as first, reader_of(teacher) as second:
        epoch = first.set_sample_generator(samples(400))()
        begun = [next(epoch) for _ in range(8)]
        waiting = second.set_sample_generator(samples(40))()
        wait_until(lambda: any(words in one.why for one in second.stats().teachers.values()))
        check(begun + list(epoch), 400)
        first.close()
        check(list(waiting), 40)
    assert teacher.metric("edl_teacher_refusals_total", reason=limit) > 0


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_queue_rows": 2, "max_batch_rows": 1}, "queue"),
        ({"max_client_bytes": 1 << 20}, "client_bytes"),
        ({"max_queue_bytes": 1 << 20}, "queue"),
    ],
)
def test_a_full_queue_is_waited_for(serve: Serve, limits: dict[str, int], reason: str) -> None:
    width = 150_000  # 600 kB a request: of a MiB, the second one is too many
    settings = {"max_batch_rows": 1, "max_message_bytes": 1 << 20, "shared_memory": False, **limits}
    teacher = serve("echo", width=width, delay_s=0.005, server=settings)

    def source() -> Iterator[Any]:
        for number in range(25):
            yield np.full((1, width), number, np.float32), number

    delivered: list[list[int]] = [[], []]

    def run(index: int) -> None:
        with DistillReader(["x", None], ["y"], teachers=[teacher.endpoint]) as reader:
            for x, number, y in reader.set_batch_generator(source)():
                assert x[0, 0] == number == y[0, 0] == y[0, -1]
                delivered[index].append(number)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert delivered == [list(range(25))] * 2
    assert teacher.metric("edl_teacher_refusals_total", reason=reason) > 0, "else nothing was shown"
    wait_until(lambda: teacher.metric("edl_teacher_client_bytes") == teacher.metric("edl_teacher_queue_bytes") == 0)
