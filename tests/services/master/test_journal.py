"""What every journal promises, in stores on real servers: bounds of values, order and fencing are theirs there."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.fast.master.test_journal import (
    StorePlace,
    test_earlier_writer_is_fenced,
    test_groups_come_back_as_they_were,
    test_killed_writer_loses_nothing,
)

__all__ = [
    "test_earlier_writer_is_fenced",
    "test_groups_come_back_as_they_were",
    "test_killed_writer_loses_nothing",
]


@pytest.fixture(params=["consul", "etcd"])
def place(request: pytest.FixtureRequest) -> Iterator[StorePlace]:
    server = request.getfixturevalue({"consul": "consul_agent", "etcd": "etcd_server"}[request.param])
    found = StorePlace(server.url, f"job-{uuid.uuid4().hex[:12]}")  # the servers serve all tests
    yield found
    found.close()
