"""What a node says of its own address."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from edl.collective.agent.command_line import address
from edl.collective.agent.command_line.address import own_address, warn_of_slow_name
from edl.errors import SettingsError


@pytest.mark.parametrize(("own", "asked"), [("10.1.2.3", "::ffff:10.1.2.3"), ("2001:db8::1", "2001:db8::1")])
def test_slow_name_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, own: str, asked: str
) -> None:
    """The user hears which line in /etc/hosts answers the question that torch asks."""
    questions: list[Any] = []

    def getnameinfo(sockaddr: Any, flags: int) -> tuple[str, str]:
        questions.append(sockaddr[0])
        raise socket.gaierror("no name")

    monkeypatch.setattr(socket, "getnameinfo", getnameinfo)
    warn_of_slow_name(own)
    assert not caplog.messages, "DNS answered at once, be it that there is no name"
    monkeypatch.setattr(address, "_SLOW_NAME_S", 0.0)
    warn_of_slow_name(own)
    assert f'The line "{asked} ' in caplog.messages[0]
    assert questions == [asked, asked]


def test_own_address_is_towards_the_store() -> None:
    assert own_address("sqlite:///a/store.sqlite") == "127.0.0.1"
    with pytest.raises(SettingsError, match=r"no way to the store's host no-such-host\.invalid"):
        own_address("consul://no-such-host.invalid:8500")


def test_own_address_of_ipv6() -> None:
    own = [each.address for nic in psutil.net_if_addrs().values() for each in nic if each.family == socket.AF_INET6]
    for each in own:
        if "%" not in each and not ipaddress.ip_address(each).is_loopback:
            assert ipaddress.ip_address(own_address(f"edl://[{each}]:29400")).version == 6
    assert own_address("consul://[::1]:8500") == own_address("consul://127.0.0.1:8500")


def test_loopback_store_uses_another_address() -> None:
    mine = own_address("consul://127.0.0.1:8500")
    assert own_address("etcd://[::1]:2379,127.0.0.1:2379") == mine, "a member that there is a way to"
    assert mine in {one.address for each in psutil.net_if_addrs().values() for one in each}
    routes = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    elsewhere = any(route[1] == "00000000" for route in routes)
    assert ipaddress.ip_address(mine).is_loopback is not elsewhere
