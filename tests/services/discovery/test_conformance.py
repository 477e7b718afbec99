"""The conformance suite over Consul and etcd, and what only they show: that a lease is renewed there."""

from __future__ import annotations

import pytest

from edl.discovery import Registry, Store
from edl.discovery.common.renewal import RenewedLease
from tests.fast.discovery.conformance.backends import teacher
from tests.fast.discovery.conformance.suite import LONG_S, RegistrySuite, StoreSuite
from tests.waiting import wait_until


class TestRegistry(RegistrySuite):
    pass


class TestStore(StoreSuite):
    @pytest.mark.parametrize("ttl_s", [8.0])
    def test_renewed_lease_outlives_its_length(self, store: Store, folder: str, ttl_s: float) -> None:
        """A second lease, which nobody renews, says when the length of both is over."""
        with store.lease(ttl_s) as renewed, store.lease(ttl_s) as left:
            assert isinstance(left, RenewedLease)
            entry = store.put(f"{folder}renewed", b"1", renewed)
            store.put(f"{folder}left", b"1", left)
            for part in left._parts:
                part.close()
            wait_until(lambda: store.get(f"{folder}left") is None)
            assert not renewed.lost
            assert store.get(entry.key) == entry


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "grpc_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")


def test_no_proxy_is_asked(dead_proxy: None, registry: Registry, service: str) -> None:
    with registry.register(teacher(service), LONG_S):
        wait_until(lambda: service in registry.services())
