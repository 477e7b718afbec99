"""Publishing and deciding over real stores of a cluster: killed, started again, with and without their memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from edl.discovery import open_store
from edl.errors import DiscoveryError
from edl.load_reporting import LoadPublisher, LoadSource, read_all_wanted, read_service
from edl.load_reporting import publisher as publisher_module
from edl.master.scaling.advisor import AdvisorSettings, ScalingAdvisor
from edl.settings import LoadSettings
from tests.plugins_consul import ConsulAgent
from tests.plugins_etcd import EtcdServer

QUICK = LoadSettings(interval_s=0.1, window_s=1.0, ttl_s=20.0)
PATIENT_S = 20.0  # a store that is slow is not away, and one that was killed refuses at once

pytestmark = [pytest.mark.consul, pytest.mark.etcd]


def until(holds: Callable[[], Any], within_s: float = 40.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.1)
    return found


@pytest.fixture(params=["consul", "etcd"])
def server(request: pytest.FixtureRequest) -> ConsulAgent | EtcdServer:
    found: ConsulAgent | EtcdServer = request.getfixturevalue(
        "consul_agent" if request.param == "consul" else "etcd_server"
    )
    return found


def test_outage_costs_a_line(
    server: ConsulAgent | EtcdServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is killed and comes back without its memory has the records again, and what is wanted."""
    monkeypatch.setattr(publisher_module, "_STORE_TIMEOUT_S", PATIENT_S)
    service = f"load-{type(server).__name__.lower()}"
    begun = time.monotonic()
    counters = {"rows_asked": 0.0, "wait_s": 0.0, "source_wait_s": 0.0}

    def read() -> dict[str, float]:
        return {**counters, "rows_asked": 100 * (time.monotonic() - begun)}

    source = LoadSource(service, "students", read, lambda: {"teachers": []})
    with caplog.at_level(logging.INFO, "edl"), open_store(server.url, timeout_s=PATIENT_S) as store:
        publisher = LoadPublisher(server.url, [source], QUICK)
        advisor = ScalingAdvisor(store, AdvisorSettings(interval_s=0.2, refresh_s=0.2, ttl_s=2.0))
        try:

            def seen() -> Any:
                try:
                    return read_service(store, service).rows_per_s > 50
                except DiscoveryError:
                    return False

            def wanted() -> Any:
                try:
                    return ("teachers", service) in read_all_wanted(store)
                except DiscoveryError:
                    return False

            until(lambda: seen() and wanted())
            server.kill()
            until(lambda: "load is not published" in caplog.text and "what is wanted stays as it is" in caplog.text)
            server.forget()
            server.start()
            until(lambda: seen() and wanted())
            until(lambda: "load is published again" in caplog.text and "loads are read again" in caplog.text)
        finally:
            advisor.close()
            publisher.close(PATIENT_S)
        until(lambda: read_service(store, service).students == (), PATIENT_S / 2)
        store.delete(f"wanted/teachers/{service}")
    assert caplog.text.count("load is not published") == 1
    assert caplog.text.count("not foreseen") == 0, caplog.text
