"""The fixtures of the conformance suite, over Consul and etcd."""

from __future__ import annotations

import pytest

from tests.fast.discovery.conformance.backends import Backend, ConsulBackend, EtcdBackend
from tests.fast.discovery.conformance.fixtures import folder, member, nothing_stays_open, registry, service, store

__all__ = ["folder", "member", "nothing_stays_open", "registry", "service", "store"]


@pytest.fixture(params=["consul", "etcd"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "consul":
        return ConsulBackend(request.getfixturevalue("consul_agent"))
    return EtcdBackend(request.getfixturevalue("etcd_server"))
