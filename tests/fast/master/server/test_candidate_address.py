"""Where workers are told that a master is."""

from __future__ import annotations

import ipaddress

import pytest

from edl.master.server.candidate_address import own_address, shown_endpoint


@pytest.mark.parametrize(
    ("host", "shown"),
    [("127.0.0.1", "127.0.0.1:7"), ("10.0.0.9", "10.0.0.9:7"), ("::1", "[::1]:7"), ("node", "node:7")],
)
def test_a_host_is_shown_as_it_was_given(host: str, shown: str) -> None:
    assert shown_endpoint(host, 7, "sqlite:////tmp/store") == shown


@pytest.mark.parametrize("url", ["sqlite:////tmp/store", "consul://127.0.0.1:8500", "etcd://localhost:2379"])
def test_an_agent_here_says_no_loopback(url: str) -> None:
    """Where there is a way out: other hosts of the cluster do not reach this host's loopback."""
    found = ipaddress.ip_address(own_address(url))
    assert found == ipaddress.ip_address(own_address("consul://192.0.2.1:8500"))
    assert not found.is_unspecified
