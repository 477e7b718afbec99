"""A master that other hosts reach asks them for a token, or says that it does not; IPv6 hosts are reached as well."""

from __future__ import annotations

import pytest

from edl.cli._credentials import default_host, warn_of_open_port
from edl.settings import Credentials


def test_default_host_reaches_other_workers() -> None:
    assert default_host("sqlite:////tmp/store.sqlite") == "127.0.0.1"
    assert default_host("consul://10.0.0.7:8500") == "::", "all addresses, IPv6 and IPv4"


def test_open_port_is_said(caplog: pytest.LogCaptureFixture) -> None:
    for host in ("::", "0.0.0.0", "10.0.0.7"):
        caplog.clear()
        warn_of_open_port(host, Credentials())
        assert f"listens on {host} without a token" in caplog.text
    caplog.clear()
    warn_of_open_port("::", Credentials(cert="c.pem", key="k.pem"))
    assert caplog.text, "TLS alone lets anyone in"


def test_closed_port_needs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        warn_of_open_port(host, Credentials())
    warn_of_open_port("::", Credentials(token_file="tokens"))
    warn_of_open_port("::", Credentials(ca="ca.pem", cert="c.pem", key="k.pem"))
    assert not caplog.text
