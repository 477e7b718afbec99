"""A registry that can be read and not written: registrations lapse, and the teachers are there all the same."""

from __future__ import annotations

import contextlib
import itertools
import socket
import sqlite3
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from edl.discovery import open_registry
from edl.distill import DistillReader, Options
from tests.fast.distill.conftest import Serve, Start, instance_of
from tests.fast.distill.reading import check, samples
from tests.waiting import wait_until


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


def reader_of(url: str, **options: int) -> DistillReader:
    reader = DistillReader(["x", None], ["y"], teacher_batch_size=1, options=Options(teacher_timeout_s=60))
    return reader.set_dynamic_teacher(url, "s", **options)


def test_lapsed_answering_teacher_is_kept(start: Start, registry_url: str) -> None:
    """One with an odd name and address; by a student that shares teachers out, and by one that starts then."""
    host = "::1" if socket.has_ipv6 and Path("/proc/net/if_inet6").exists() else "127.0.0.1"
    told: Any = {"metrics-port": 0, "host": host, "id": "ü / : %41 [x]"}
    teacher = start("echo", service="s", discovery=registry_url, serve=told)

    def registered() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{teacher.metrics_port}/metrics", timeout=60) as page:
            lines = page.read().decode().splitlines()
        return next(line.split()[-1] for line in lines if line.startswith("edl_teacher_registered"))

    with reader_of(registry_url, require_max_teacher=1).set_sample_generator(samples(100)) as reader:
        rows = reader()
        delivered = list(itertools.islice(rows, 20))
        with unwritable(registry_url):
            wait_until(lambda: "ü / : %41 [x]" in reader.stats().discovery, "the lapse")
            assert registered() == "0.0"
            assert reader.stats().teachers_live == 1, "the teacher is alive, and connected"
            delivered += rows
            wait_until(lambda: "cannot be kept registered" in teacher.log)
            with reader_of(registry_url).set_sample_generator(samples(20)) as newcomer:
                check(list(newcomer()), 20)
                assert "lapsed" in newcomer.stats().discovery
        wait_until(lambda: not reader.stats().discovery, "the renewed registration")
        assert reader.stats().rows_resent == 0
        (endpoint,) = (one.endpoint for one in reader.stats().teachers.values())
    assert registered() == "1.0"
    assert endpoint.startswith("[::1]:" if host == "::1" else host)
    check(delivered, 100)


def test_who_is_at_a_lapsed_address(serve: Serve, registry_url: str) -> None:
    """Only a server of the version that registered is used; the others, and the dead, are told so."""
    found = {"same": "1", "another": "2", "unnamed": ""}
    instances = [
        replace(instance_of(serve("echo").endpoint, "s", name), meta={"version": version} if version else {})
        for name, version in found.items()
    ]
    instances.append(instance_of("127.0.0.1:9", "s", "dead"))
    reasons = {
        "another": "has version '1', and version '2' registered",
        "unnamed": "nothing tells whether this is who registered",
        "dead": "refused",
    }
    with open_registry(registry_url) as registry, contextlib.ExitStack() as stack:
        for instance in instances:
            stack.enter_context(registry.register(instance, ttl_s=0.5))
        with unwritable(registry_url):
            wait_until(lambda: len(lapsed(registry_url)) == len(instances))
            with reader_of(registry_url).set_sample_generator(samples(20)) as reader:
                check(list(reader()), 20)

                def told() -> bool:
                    teachers = reader.stats().teachers
                    return all(words in teachers[name].why for name, words in reasons.items() if name in teachers)

                wait_until(lambda: reasons.keys() <= reader.stats().teachers.keys() and told(), "the reasons")
                assert {name for name, one in reader.stats().teachers.items() if one.rows} == {"same"}
