"""`edl register` with the real Triton: in discovery while it is ready, with its priority, and behind a TLS proxy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.discovery import Instance, open_registry
from edl.distill import Credentials, DistillReader, Options, Teachers
from edl.errors import NoTeacherError
from edl.protocol import names
from edl.protocol.transport import grpc
from tests.certificates import Authority, put
from tests.plugins_triton import TritonFactory
from tests.waiting import DEADLINE_S, wait_until

Start = Callable[..., "subprocess.Popen[bytes]"]
QUICK = ("--interval", "100ms", "--timeout", "5s", "--ttl", "60s")
TOKEN = "token-of-a-test-0123456789"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/discovery.sqlite"


@pytest.fixture
def register(url: str, tmp_path: Path) -> Iterator[Start]:
    """Starts `edl register` in the background; its log is `register.log`."""
    started: list[subprocess.Popen[bytes]] = []

    def start(endpoint: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "edl", "register", endpoint, "--discovery", url, *QUICK, *arguments]
        with (tmp_path / "register.log").open("ab") as log:
            started.append(
                subprocess.Popen([*command, "--exit-with", str(os.getpid())], stdin=subprocess.DEVNULL, stderr=log)
            )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def seen(url: str, service: str, count: int) -> tuple[Instance, ...]:
    """The instances of `service` once there are so many."""
    with open_registry(url) as registry:
        wait_until(lambda: len(registry.snapshot(service).instances) == count, f"{count} instances of {service}")
        return registry.snapshot(service).instances


def test_triton_enters_leaves_and_returns(triton: TritonFactory, register: Start, url: str, tmp_path: Path) -> None:
    server, ready = triton.start("sums"), tmp_path / "ready"
    process = register(
        *(server.endpoint, "--model", "sums", "--service", "labels", "--capacity", "2.5", "--tag", "gpu"),
        *("--meta", "rack=r7", "--ready-file", str(ready), "--priority", "lowest"),
    )
    (instance,) = seen(url, "labels", 1)
    assert (instance.endpoint, instance.model, instance.capacity) == (server.endpoint, "sums", 2.5)
    assert instance.tags == ("gpu",)
    assert instance.meta == {"rack": "r7", "version": "1", "priority": "lowest"}
    wait_until(ready.exists)
    server.stop()
    seen(url, "labels", 0)
    wait_until(lambda: not ready.exists())
    assert process.poll() is None
    triton.start("sums", port=server.port)
    assert seen(url, "labels", 1) == (instance,)
    process.terminate()
    assert process.wait(DEADLINE_S) == 0
    seen(url, "labels", 0)
    log = (tmp_path / "register.log").read_text()
    assert "out of discovery until it is ready again" in log
    assert "Traceback" not in log


class Proxy:
    """What stands before a Triton: it speaks TLS, looks for the token, and passes the bytes on."""

    def __init__(self, target: str, ca: Authority) -> None:
        self.refused = 0
        self._target = grpc.insecure_channel(target)
        self._server = grpc.server(ThreadPoolExecutor(4), handlers=[self._handler()])
        pair = ca.issue("127.0.0.1")
        port = self._server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(pair.key, pair.cert)]))
        self.endpoint = f"127.0.0.1:{port}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait()
        self._target.close()

    def _handler(self) -> grpc.GenericRpcHandler:
        def service(details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(
                lambda data, context: self._pass_on(details.method, data, context)
            )

        return type("Handler", (grpc.GenericRpcHandler,), {"service": lambda _, details: service(details)})()

    def _pass_on(self, method: str, data: bytes, context: Any) -> bytes:
        if ("authorization", f"Bearer {TOKEN}") not in context.invocation_metadata():
            self.refused += 1
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "not without a token")
        try:
            answer: bytes = self._target.unary_unary(method)(data, timeout=DEADLINE_S)
        except grpc.RpcError as exc:
            failure: Any = exc
            context.abort(failure.code(), failure.details())
        return answer


def ask(teachers: Teachers, credentials: Credentials, timeout_s: float = DEADLINE_S) -> list[Any]:
    """Outputs for ones."""
    options = Options(teacher_timeout_s=timeout_s, credentials=credentials)
    with DistillReader(["x"], ["logits"], teachers=teachers, options=options) as reader:
        reader.set_batch_generator(lambda: ((np.ones((4, 4), np.float32),) for _ in range(3)))
        return [answer for _, answer in reader()]


def test_triton_behind_a_proxy(triton: TritonFactory, register: Start, tmp_path: Path, url: str) -> None:
    """A reader, and `edl register`, speak TLS to it and show the token with each call."""
    ca = Authority()
    saved, token = ca.save(tmp_path), put(tmp_path / "token", TOKEN)
    proxy = Proxy(triton.start("sums").endpoint, ca)
    try:
        register(proxy.endpoint, "--model", "sums", "--tls-ca", saved, "--token-file", token)
        (instance,) = seen(url, "sums", 1)
        assert instance.meta[names.TLS_META] == "1"
        answers = ask(Teachers("sums", discovery=url), Credentials(ca=saved, token_file=token))
        assert all((answer == 4).all() for answer in answers)
        assert proxy.refused == 0
        with pytest.raises(NoTeacherError, match=r"refuses this student \(UNAUTHENTICATED\): not without a token"):
            ask(Teachers("sums", discovery=url), Credentials(ca=saved), timeout_s=10.0)
    finally:
        proxy.close()
