"""Publishing and deciding over real stores of a cluster, which are killed and come back without their memory."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import pytest

from edl.discovery import open_store
from edl.errors import DiscoveryError
from edl.load_reporting import LoadPublisher, LoadSource, read_all_wanted, read_service
from edl.load_reporting import publisher as publisher_module
from edl.master.scaling.advisor import AdvisorSettings, ScalingAdvisor
from edl.settings import LoadSettings
from tests.plugins_consul import ConsulAgent
from tests.plugins_etcd import EtcdServer
from tests.waiting import DEADLINE_S, wait_until

PATIENT_S = 30.0  # a store that is slow is not away, and one that was killed refuses at once


@pytest.fixture(params=["consul_agent", "etcd_server"])
def server(request: pytest.FixtureRequest) -> ConsulAgent | EtcdServer:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def test_outage_costs_a_line(
    server: ConsulAgent | EtcdServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards the records are there again, and what is wanted."""
    monkeypatch.setattr(publisher_module, "_STORE_TIMEOUT_S", PATIENT_S)
    caplog.set_level(logging.INFO, "edl")
    service, rows = f"load-{type(server).__name__.lower()}", itertools.count(step=100)
    source = LoadSource(
        service,
        "students",
        lambda: {"rows_asked": next(rows), "wait_s": 0.0, "source_wait_s": 0.0},
        lambda: {"teachers": []},
    )
    with open_store(server.url, timeout_s=PATIENT_S) as store:

        def answers(holds: Callable[[], bool]) -> bool:
            try:
                return holds()
            except DiscoveryError:
                return False

        def is_whole() -> bool:
            return answers(lambda: read_service(store, service).rows_per_s > 0) and answers(
                lambda: ("teachers", service) in read_all_wanted(store)
            )

        publisher = LoadPublisher(server.url, [source], LoadSettings(interval_s=0.1, window_s=1.0, ttl_s=600.0))
        advisor = ScalingAdvisor(store, AdvisorSettings(interval_s=0.2, refresh_s=0.2, ttl_s=2.0))
        try:
            wait_until(is_whole)
            server.kill()
            wait_until(
                lambda: "load is not published" in caplog.text and "what is wanted stays as it is" in caplog.text
            )
            server.forget()
            server.start()
            wait_until(is_whole)
            wait_until(lambda: "load is published again" in caplog.text and "loads are read again" in caplog.text)
        finally:
            advisor.close()
            publisher.close(DEADLINE_S)
        assert read_service(store, service).students == ()
        store.delete(f"wanted/teachers/{service}")
    assert caplog.text.count("load is not published") == 1
    assert caplog.text.count("not foreseen") == 0, caplog.text
