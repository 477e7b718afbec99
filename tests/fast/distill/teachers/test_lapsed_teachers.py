"""A registry that can be read and not written: registrations lapse, and the teachers are there all the same."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import socket
import sqlite3
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from edl.discovery import open_registry
from edl.distill import DistillReader, Options
from edl.testing import LocalTeacher
from tests.fast.distill.conftest import Start, until
from tests.fast.distill.reading import check, samples, words_of_failure
from tests.plugins_consul import free_ports


@contextlib.contextmanager
def unwritable(path: Path) -> Iterator[None]:
    """Hold the file's write lock, as a process that hangs in a transaction does: readers go on."""
    with contextlib.closing(sqlite3.connect(path, timeout=10, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "discovery.sqlite"


def lapsed(path: Path) -> set[str]:
    with open_registry(f"sqlite:///{path}") as registry:
        return {instance.id for instance in registry.snapshot("s").lapsed}


def metrics(teacher: LocalTeacher) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{teacher.metrics_port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def reader_of(url: str, timeout_s: float = 60.0, **options: int) -> DistillReader:
    reader = DistillReader(["x", None], ["y"], teacher_batch_size=1, options=Options(teacher_timeout_s=timeout_s))
    return reader.set_dynamic_teacher(url, "s", **options)


def lost_reader(url: str, timeout_s: float) -> DistillReader:
    return reader_of(url, timeout_s).set_sample_generator(samples(20))


@pytest.mark.parametrize("max_teacher", [None, 1])
def test_lapsed_answering_teacher_is_kept(start: Start, path: Path, registry_url: str, max_teacher: int | None) -> None:
    """A lapsed teacher that answers is kept."""
    teacher = start("echo", service="s", discovery=registry_url, serve={"metrics-port": 0})
    options = {} if max_teacher is None else {"require_max_teacher": max_teacher}
    going = threading.Event()

    def source() -> Iterator[tuple[object, ...]]:
        for number, row in enumerate(samples(400)()):
            assert number < 50 or going.wait(60)
            yield row

    with reader_of(registry_url, 5.0, **options).set_sample_generator(source) as reader:
        rows = reader()
        delivered = list(itertools.islice(rows, 20))
        with unwritable(path):
            until(lambda: bool(lapsed(path)), 30)
            until(lambda: "lapsed" in reader.stats().discovery, 30)
            assert 'edl_teacher_registered{model="m"} 0.0' in metrics(teacher)
            assert reader.stats().teachers_live == 1, "the teacher is alive, and connected"
            going.set()
            delivered += rows
            until(lambda: "cannot be kept registered" in teacher.log, 30)
        until(lambda: not reader.stats().discovery, 30)
        assert reader.stats().rows_resent == 0
    assert 'edl_teacher_registered{model="m"} 1.0' in metrics(teacher)
    check(delivered, 400)


def test_a_student_that_starts_then_finds_it(start: Start, path: Path, registry_url: str) -> None:
    start("echo", service="s", discovery=registry_url)
    with unwritable(path):
        until(lambda: bool(lapsed(path)), 30)
        with reader_of(registry_url).set_sample_generator(samples(20)) as reader:
            check(list(reader()), 20)
            assert "lapsed" in reader.stats().discovery


def test_lapsed_draining_teacher_is_left(start: Start, path: Path, registry_url: str) -> None:
    """A lapsed teacher that drains is left."""
    first = start("echo", service="s", discovery=registry_url, serve={"drain-timeout": "10s"})
    second = start("echo", service="s", discovery=registry_url)
    with reader_of(registry_url).set_sample_generator(samples(4000, 0.001)) as reader:
        rows = reader()
        delivered = list(itertools.islice(rows, 20))
        until(lambda: reader.stats().teachers_live == 2, 30)
        with unwritable(path):
            until(lambda: len(lapsed(path)) == 2, 30)
            first.terminate()
            delivered += itertools.islice(rows, 500)
            assert first.wait(30) == 0
            delivered += rows
            assert reader.stats().teachers_live == 1
    check(delivered, 4000)
    assert second.is_alive()


def test_another_server_there_is_refused(start: Start, path: Path, registry_url: str) -> None:
    """Another server at its address is refused."""
    port = free_ports(1)[0]
    teacher = start("echo", service="s", discovery=registry_url, port=port)
    with unwritable(path):
        until(lambda: bool(lapsed(path)), 30)
        teacher.kill()
        start("echo", port=port, serve={"model-version": "another"})
        assert "lapsed" in words_of_failure("lapsed", functools.partial(lost_reader, registry_url))


def test_one_that_is_dead_is_told_so(start: Start, path: Path, registry_url: str) -> None:
    start("echo", service="s", discovery=registry_url).kill()
    until(lambda: bool(lapsed(path)), 30)
    words = "registration has lapsed.*refused"
    assert re.search(words, words_of_failure(words, functools.partial(lost_reader, registry_url)))


def test_odd_names_and_addresses_are_borne(start: Start, path: Path, registry_url: str) -> None:
    host = "::1" if socket.has_ipv6 and Path("/proc/net/if_inet6").exists() else "127.0.0.1"
    start("echo", service="s", discovery=registry_url, serve={"host": host, "id": "ü / : %41 [x]"})
    with reader_of(registry_url).set_sample_generator(samples(20)) as reader:
        check(list(reader()), 20)
        with unwritable(path):
            until(lambda: "ü / : %41 [x]" in reader.stats().discovery, 30)
            check(list(reader()), 20)
        (endpoint,) = (teacher.endpoint for teacher in reader.stats().teachers.values())
        assert endpoint.startswith("[::1]:" if host == "::1" else host)
