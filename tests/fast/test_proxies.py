"""Nothing of EDL goes through an HTTP proxy that `http_proxy` or its like name: it would end at a dead port."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest

from edl.distill import DistillReader
from edl.testing import LocalTeacher
from edl_serving.cmd_register import ForeignServer
from edl_serving.registration import ProbeStatus

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


def test_a_teacher_is_asked_directly(dead_proxy: str) -> None:
    """By what registers it and by students; the servers of registries in `tests/services/discovery`."""
    with LocalTeacher("echo") as teacher:
        server = ForeignServer(teacher.endpoint, "m", 60.0)
        try:
            result = server.probe()
        finally:
            server.close()
        assert result.status is ProbeStatus.READY, f"{dead_proxy} was asked: {result.reason}"
        with DistillReader(ins=["x"], predicts=["y"]) as reader:
            reader.set_fixed_teacher([teacher.endpoint])
            reader.set_batch_generator(lambda: iter([(np.ones((2, 4), np.float32),)]))
            assert len(list(reader())) == 1, f"{dead_proxy} was asked"
