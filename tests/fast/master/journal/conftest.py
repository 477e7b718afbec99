"""Every test that asks for a `place` runs over a file, and over stores of each kind, the real servers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fast.discovery.conformance.backends import ServedBackend
from tests.fast.master.journal.places import FilePlace, Place, StorePlace


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "place" in metafunc.fixturenames:
        servers = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("consul", "etcd")]
        metafunc.parametrize("place", ["file", "store", "served", *servers], indirect=True)


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    served = None
    job = f"job-{uuid.uuid4().hex[:12]}"  # the servers serve all tests
    found: Place
    if request.param == "file":
        found = FilePlace(tmp_path / "folder" / "journal.sqlite")
    elif request.param == "served":
        served = ServedBackend(tmp_path / "store.sqlite")
        found = StorePlace(served.url, job)
    elif request.param == "store":
        found = StorePlace(f"sqlite:///{tmp_path}/store.sqlite", job)
    else:
        server = request.getfixturevalue({"consul": "consul_agent", "etcd": "etcd_server"}[request.param])
        found = StorePlace(server.url, job)
    yield found
    found.close()
    if served is not None:
        served.stop()
