"""Teachers that come, go, are killed, have no room or misbehave, or a registry that does: each sample once."""

from __future__ import annotations

import contextlib
import itertools
import socket
import sqlite3
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.discovery import Registry, open_registry
from edl.distill import DistillReader, Options
from edl.distill.transport.calls import _OPTIONS
from edl.errors import NoTeacherError
from edl.protocol import names
from tests.fast.distill.conftest import Serve, Start, announce_less, instance_of
from tests.fast.distill.reading import Held, check, reader_of, samples
from tests.waiting import wait_until


def service_reader(url: str, most: int | None = None, rows: int = 4) -> DistillReader:
    reader = DistillReader(["x", None], ["y"], teacher_batch_size=rows, options=Options(teacher_timeout_s=60))
    return reader.set_dynamic_teacher(url, "s", most)


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


def test_teachers_appear_and_drain(serve: Serve, registry: Registry, url: str) -> None:
    first, second = serve("echo", delay_s=0.001), serve("echo", delay_s=0.001)
    with service_reader(url, rows=1) as reader:
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


@pytest.mark.parametrize("over_grpc", [False, True])
def test_closed_connections_requests_move(
    serve: Serve, registry: Registry, url: str, monkeypatch: pytest.MonkeyPatch, over_grpc: bool
) -> None:
    """An instance that moves to another address is disconnected at once, requests under way or not."""
    if over_grpc:
        announce_less(monkeypatch, names.EXTENSION_CHANNEL)
    held = Held()
    here, there = serve(held), serve("echo")
    reader = service_reader(url).set_sample_generator(samples(200))
    try:
        with registry.register(instance_of(here.endpoint, "s", "moving"), ttl_s=600) as registration, reader:
            rows = reader()
            assert held.entered.wait(90)
            registration.update(instance_of(there.endpoint, "s", "moving"))
            check(list(rows), 200)
            stats = reader.stats()
    finally:
        held.go.set()
    assert stats.rows_resent > 0
    assert stats.rows_received == 200


@pytest.mark.parametrize("over_grpc", [False, True])
def test_paused_only_teacher_is_missed(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, over_grpc: bool
) -> None:
    """Its connection stays, as with a machine that vanishes: pings tell."""
    sooner = {
        "grpc.keepalive_time_ms": 1000,
        "grpc.keepalive_timeout_ms": 2000,
        "grpc.http2.ping_timeout_ms": 3000,
    }
    assert sooner.keys() <= dict(_OPTIONS).keys(), "a user's connections are pinged, less often"
    sooner["grpc.http2.max_pings_without_data"] = 0  # no limit: by default it soon sends one a minute
    monkeypatch.setattr("edl.distill.transport.calls._OPTIONS", [*(dict(_OPTIONS) | sooner).items()])
    monkeypatch.setattr("edl.distill.transport.channel._PING_S", 1.0)
    monkeypatch.setattr("edl.distill.transport.channel._LOST_S", 4.0)
    teacher = start("echo", delay_s=0.01, serve={"tensor-channel": not over_grpc})
    with reader_of(teacher, options=Options(teacher_timeout_s=1)).set_sample_generator(samples(5000)) as reader:
        rows = reader()
        next(rows)
        teacher.pause()
        with pytest.raises(NoTeacherError, match="ping timeout" if over_grpc else "was silent for 4 s"):
            list(rows)
        teacher.resume()
    assert any("no live teacher" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("limit", "words"), [("streams", "streams are open"), ("connections", "clients are connected")]
)
def test_a_student_waits_for_room(serve: Serve, limit: str, words: str) -> None:
    teacher = serve("echo", delay_s=0.001, server={f"max_{limit}": 1, "tensor_channel": True})
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


@contextlib.contextmanager
def unwritable(url: str) -> Iterator[None]:
    """Hold the file's write lock, as a process that hangs in a transaction does: readers go on."""
    path = url.removeprefix("sqlite:///")
    with contextlib.closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


def lapsed(url: str) -> set[str]:
    with open_registry(url) as registry:
        return {instance.id for instance in registry.snapshot("s").lapsed}


def test_lapsed_answering_teacher_is_kept(start: Start, url: str) -> None:
    """One with an odd name and address; by a student that shares teachers out, and by one that starts then."""
    host = "::1" if socket.has_ipv6 and Path("/proc/net/if_inet6").exists() else "127.0.0.1"
    told: Any = {"metrics-port": 0, "host": host, "id": "ü / : %41 [x]"}
    teacher = start("echo", service="s", discovery=url, serve=told)

    def registered() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{teacher.metrics_port}/metrics", timeout=60) as page:
            lines: list[str] = page.read().decode().splitlines()
        return next(line.split()[-1] for line in lines if line.startswith("edl_teacher_registered"))

    with service_reader(url, 1, 1).set_sample_generator(samples(100)) as reader:
        rows = reader()
        delivered = list(itertools.islice(rows, 20))
        with unwritable(url):
            wait_until(lambda: "ü / : %41 [x]" in reader.stats().discovery, "the lapse")
            assert registered() == "0.0"
            assert reader.stats().teachers_live == 1, "the teacher is alive, and connected"
            delivered += rows
            wait_until(lambda: "cannot be kept registered" in teacher.log)
            with service_reader(url).set_sample_generator(samples(20)) as newcomer:
                check(list(newcomer()), 20)
                assert "lapsed" in newcomer.stats().discovery
        wait_until(lambda: not reader.stats().discovery, "the renewed registration")
        assert reader.stats().rows_resent == 0
        (endpoint,) = (one.endpoint for one in reader.stats().teachers.values())
    assert registered() == "1.0"
    assert endpoint.startswith("[::1]:" if host == "::1" else host)
    check(delivered, 100)


def test_who_is_at_a_lapsed_address(serve: Serve, registry: Registry, url: str, stack: contextlib.ExitStack) -> None:
    """Only a server of the version that registered is used; the others, and the dead, are told so."""
    found = {"same": "1", "another": "2", "unnamed": ""}
    instances = [
        replace(instance_of(serve("echo").endpoint, "s", name), meta={"version": version} if version else {})
        for name, version in found.items()
    ]
    instances.append(instance_of("127.0.0.1:9", "s", "dead"))
    reasons = {
        "another": "has version '1', but version '2' registered",
        "unnamed": "without a version, it cannot be identified as the server that registered",
        "dead": "refused",
    }
    for instance in instances:
        stack.enter_context(registry.register(instance, ttl_s=0.5))
    with unwritable(url):
        wait_until(lambda: len(lapsed(url)) == len(instances))
        with service_reader(url).set_sample_generator(samples(20)) as reader:
            check(list(reader()), 20)

            def told() -> bool:
                teachers = reader.stats().teachers
                return all(words in teachers[name].why for name, words in reasons.items() if name in teachers)

            wait_until(lambda: reasons.keys() <= reader.stats().teachers.keys() and told(), "the reasons")
            assert {name for name, one in reader.stats().teachers.items() if one.rows} == {"same"}
