"""What a node says of its own address."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from edl.collective.agent.command_line import address
from edl.collective.agent.command_line.address import warn_of_slow_name


@pytest.mark.parametrize(
    ("own", "asked"), [("10.1.2.3", "::ffff:10.1.2.3"), ("2001:db8::1", "2001:db8::1"), ("node5", "::ffff:node5")]
)
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
