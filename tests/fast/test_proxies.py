"""Nothing of EDL goes through an HTTP proxy that `http_proxy` or its like name: it would end at a dead port."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest

from edl.discovery import Instance, open_registry
from edl.distill import DistillReader
from edl.testing import LocalTeacher
from edl_serving.registration.probe import ProbeStatus, ReadinessProbe, newest_version
from tests.plugins_consul import ConsulAgent
from tests.plugins_etcd import EtcdServer

VARIABLES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "grpc_proxy", "all_proxy", "ALL_PROXY")


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with socket.socket() as bound:  # not listened on: a connection is refused
        bound.bind(("127.0.0.1", 0))
        proxy = f"http://127.0.0.1:{bound.getsockname()[1]}"
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        for name in VARIABLES:
            monkeypatch.setenv(name, proxy)
        yield proxy


def test_register_asks_a_server_directly(dead_proxy: str) -> None:
    with LocalTeacher("echo") as teacher:
        server = ReadinessProbe(teacher.endpoint, "m", 10.0)
        try:
            result = server.probe()
        finally:
            server.close()
    assert result.status is ProbeStatus.READY, f"{dead_proxy} was asked: {result.reason}"


def test_students_talk_to_teachers_directly(dead_proxy: str) -> None:
    with LocalTeacher("echo") as teacher, DistillReader(ins=["x"], predicts=["y"]) as reader:
        reader.set_fixed_teacher([teacher.endpoint])
        reader.set_batch_generator(lambda: iter([(np.ones((2, 4), np.float32),)]))
        assert len(list(reader())) == 1, f"{dead_proxy} was asked"


@pytest.mark.consul
def test_consul_is_asked_directly(dead_proxy: str, consul_agent: ConsulAgent) -> None:
    with open_registry(consul_agent.url) as registry, registry.register(Instance("proxied", "a", "127.0.0.1", 1)):
        assert "proxied" in registry.services(), f"{dead_proxy} was asked"


@pytest.mark.etcd
def test_etcd_is_asked_directly(dead_proxy: str, etcd_server: EtcdServer) -> None:
    with open_registry(etcd_server.url) as registry, registry.register(Instance("proxied", "a", "127.0.0.1", 1)):
        assert "proxied" in registry.services(), f"{dead_proxy} was asked"


def test_the_newest_version_is_found_in_any() -> None:
    assert newest_version(["9", "10", "x"]) == "10", "numbers are compared as numbers"
    assert newest_version(["b", "a", "9" * 5000]) == "b", "digits without an end are text"
    assert newest_version([]) == ""
