"""What the suite's tests ask for; each tier's `conftest` adds `backend`."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edl.discovery import Registry, Store, open_registry, open_store
from tests.fast.discovery.conformance.backends import Backend
from tests.fast.discovery.conformance.processes import Member, members
from tests.waiting import wait_until

PATIENT_S = 30.0
"""Seconds that a request may take: a machine that is busy is not an outage, and what is broken refuses at once."""


def _open_things() -> set[str]:
    """Threads of EDL, and files and sockets that are open."""
    things = {thread.name for thread in threading.enumerate() if thread.name.startswith("edl-")}
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(descriptor.readlink())
            # Connections to a database that was deleted under them stay open on purpose, see `edl.discovery.sqlite`.
            if target.startswith("socket:") or (".sqlite" in target and not target.endswith(" (deleted)")):
                things.add(f"{descriptor.name} -> {target}")
    return things


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    """A socket of a fixture, or of gRPC, may be closing when the test ends."""
    before = _open_things()
    yield
    wait_until(lambda: _open_things() <= before, "the closing of all threads, files and sockets")


@pytest.fixture
def registry(backend: Backend) -> Iterator[Registry]:
    with open_registry(backend.url, timeout_s=PATIENT_S) as registry:
        yield registry


@pytest.fixture
def store(backend: Backend) -> Iterator[Store]:
    with open_store(backend.url, timeout_s=PATIENT_S) as store:
        yield store


@pytest.fixture
def service() -> str:
    """A service that nobody else uses: the servers serve all tests."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def folder(service: str) -> str:
    """A folder of keys that nobody else uses."""
    return f"{service}/"


@pytest.fixture
def member(backend: Backend) -> Iterator[Callable[..., Member]]:
    with members(backend.url) as start:
        yield start
