"""Every test of this folder runs over all implementations, and must leave nothing open."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from edl.discovery import Registry, Store, open_registry, open_store
from tests.fast.discovery.conformance.backends import (
    Backend,
    ConsulBackend,
    EtcdBackend,
    ServedBackend,
    SqliteBackend,
    eventually,
)
from tests.fast.discovery.conformance.kubernetes_backend import open_kubernetes_backend
from tests.fast.discovery.conformance.processes import Member

if TYPE_CHECKING:
    from tests.cluster.api import Cluster


def _open_things() -> set[str]:
    """Threads of EDL's discovery, and files and sockets that are open."""
    things = {thread.name for thread in threading.enumerate() if thread.name.startswith("edl-")}
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue
        if target.startswith("socket:") or ".sqlite" in target:
            things.add(f"{descriptor.name} -> {target}")
    return things


@pytest.fixture(autouse=True)
def _nothing_stays_open(request: pytest.FixtureRequest) -> Iterator[None]:
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params.get("backend") == "kubernetes":
        request.getfixturevalue("kubernetes_backend")  # has sockets, and is there for all tests
    before = _open_things()
    yield
    eventually(lambda: not _open_things() - before, 30.0)  # a socket of a fixture, or of gRPC, may be closing
    assert _open_things() - before == set()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests run over each implementation, and those that are marked `stores` over a store that is served as well."""
    if "backend" in metafunc.fixturenames:
        servers = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("consul", "etcd")]
        # The first of these may have to wait until a cluster is up.
        servers.append(
            pytest.param("kubernetes", marks=[pytest.mark.kubernetes, pytest.mark.timeout(120, func_only=True)])
        )
        served = ["served"] if metafunc.definition.get_closest_marker("stores") else []
        metafunc.parametrize("backend", ["sqlite", *servers, *served], indirect=True)


@pytest.fixture(scope="session")
def kubernetes_backend(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """A namespace for all these tests, behind a proxy that can be taken away."""
    with open_kubernetes_backend(cluster, tmp_path_factory.mktemp("kubernetes")) as backend:
        yield backend


@pytest.fixture
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    if request.param == "sqlite":
        yield SqliteBackend(tmp_path / "discovery.sqlite")
    elif request.param == "consul":
        yield ConsulBackend(request.getfixturevalue("consul_agent"))
    elif request.param == "etcd":
        yield EtcdBackend(request.getfixturevalue("etcd_server"))
    elif request.param == "kubernetes":
        yield request.getfixturevalue("kubernetes_backend")
    else:
        served = ServedBackend(tmp_path / "discovery.sqlite")
        yield served
        served.stop()


@pytest.fixture
def registry(backend: Backend) -> Iterator[Registry]:
    with open_registry(backend.url) as registry:
        yield registry


@pytest.fixture
def store(backend: Backend) -> Iterator[Store]:
    with open_store(backend.url) as store:
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
    """Starts processes that take part; they are killed at the end."""
    members: list[Member] = []

    def start(*arguments: str) -> Member:
        members.append(Member(backend.url, *arguments))
        return members[-1]

    yield start
    for one in members:
        one.end()
