"""Who may ask a teacher that takes tokens: of each method, known or not, and of the stream."""

from __future__ import annotations

import os
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.protocol import kserve, names
from edl.protocol.tls import credentials
from edl.protocol.transport import grpc
from edl.settings import Credentials
from edl_serving.rpc import authentication
from tests.certificates import Authority, put
from tests.fast.serving.conftest import TIMEOUT_S, Inside, StartInside, request_bytes, until
from tests.fast.serving.fakes import FakeBackend

FIRST, SECOND = "first-token-0123456789", "second-token-0123456789"
METHODS = [
    *("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig", "RepositoryIndex"),
    *("SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister", "ModelInfer"),
]
X = request_bytes({"x": np.ones((2, 4), np.float32)})


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    return put(tmp_path / "tokens", f"# of the first team\n{FIRST}\n\n# of the second\n{SECOND}\n")


@pytest.fixture
def teacher(inside: StartInside, token_file: str) -> Inside:
    return inside(FakeBackend(), credentials=Credentials(token_file=token_file))


@pytest.fixture
def channel(teacher: Inside) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(teacher.target) as channel:
        yield channel


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def code_of(call: Any) -> str:
    """The status of a call, in whose words no token stands."""
    try:
        call()
    except grpc.RpcError as exc:
        failure: Any = exc
    else:
        return "OK"
    assert not any(secret in str(failure.details()) for secret in (FIRST, SECOND)), "a token in the words of a refusal"
    return str(failure.code().name)


def ask(channel: grpc.Channel, path: str, metadata: Any = (), data: bytes = b"") -> str:
    return code_of(lambda: channel.unary_unary(path)(data, metadata=metadata, timeout=TIMEOUT_S))


@pytest.mark.parametrize("method", [*METHODS, "NoSuchMethod"])
def test_no_method_without_a_token(channel: grpc.Channel, method: str) -> None:
    path = names.method(method)
    assert ask(channel, path) == "UNAUTHENTICATED"
    assert ask(channel, path, bearer("third-token-0123456789")) == "UNAUTHENTICATED"
    assert ask(channel, path, bearer(FIRST)) != "UNAUTHENTICATED"
    assert ask(channel, path, bearer(SECOND)) != "UNAUTHENTICATED"


def test_other_services_are_shut_as_well(channel: grpc.Channel) -> None:
    assert ask(channel, "/other.Service/Method") == "UNAUTHENTICATED", "which services there are is seen by strangers"


WRONG = {
    "basic": [("authorization", f"Basic {FIRST}")],
    "bare": [("authorization", FIRST)],
    "empty": [("authorization", "Bearer ")],
    "half": bearer(FIRST[:-1]),
    "longer": bearer(FIRST + "0"),
    "comment": bearer("# of the first team"),
    "both": [*bearer("nonsense"), *bearer(FIRST)],
    "all": bearer(f"{FIRST}\n{SECOND}".replace("\n", " ")),
    "case": bearer(FIRST.upper()),
}


@pytest.mark.parametrize("metadata", WRONG.values(), ids=WRONG)
def test_wrong_tokens(channel: grpc.Channel, metadata: list[tuple[str, str]]) -> None:
    assert ask(channel, names.method("ModelInfer"), metadata, X) == "UNAUTHENTICATED"


def test_right_token_in_any_case_of_bearer(channel: grpc.Channel) -> None:
    assert ask(channel, names.method("ModelInfer"), [("authorization", f"bearer {FIRST}")], X) == "OK"


def test_stream_needs_a_token(channel: grpc.Channel) -> None:
    call = channel.stream_stream(names.method("ModelStreamInfer"))
    assert code_of(lambda: list(call(iter([X]), timeout=TIMEOUT_S))) == "UNAUTHENTICATED"
    answers = list(call(iter([X, X]), metadata=bearer(SECOND), timeout=TIMEOUT_S))
    messages = [kserve.ModelStreamInferResponse.FromString(answer) for answer in answers]
    assert [message.error_message for message in messages] == ["", ""]


def test_refused_call_is_not_read(teacher: Inside, channel: grpc.Channel) -> None:
    assert ask(channel, names.method("ModelInfer"), data=b"\0" * (64 << 20)) == "UNAUTHENTICATED"


@pytest.mark.parametrize("open_health", [True, False])
def test_health(inside: StartInside, token_file: str, open_health: bool) -> None:
    made = inside(FakeBackend(), credentials=Credentials(token_file=token_file), open_health=open_health)
    with grpc.insecure_channel(made.target) as channel:
        health = "/grpc.health.v1.Health/Check"
        assert ask(channel, health) == ("OK" if open_health else "UNAUTHENTICATED")
        assert ask(channel, health, bearer(FIRST)) == "OK"
        assert ask(channel, "/grpc.health.v1.HealthX/Check") == "UNAUTHENTICATED"


def test_metrics_hold_no_secret(inside: StartInside, token_file: str) -> None:
    made = inside(FakeBackend(), credentials=Credentials(token_file=token_file), metrics_port=0)
    with grpc.insecure_channel(made.target) as channel:
        assert ask(channel, names.method("ModelInfer"), bearer(FIRST), X) == "OK"
    with urllib.request.urlopen(f"http://127.0.0.1:{made.server.metrics_port}/metrics", timeout=TIMEOUT_S) as answer:
        text = answer.read().decode()
    assert "edl_teacher_requests_total" in text
    assert FIRST not in text


def test_revocation_outlives_errors(
    inside: StartInside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Handshakes and the look for revocations meet an unforeseen error; both go on, and the token is taken back."""
    monkeypatch.setattr(authentication, "CHECK_EVERY_S", 0.1)
    monkeypatch.setattr(credentials, "CHECK_EVERY_S", 0.1)
    ca, token, requests = Authority(), tmp_path / "tokens", StillOpen([X])
    put(token, f"{FIRST}\n{SECOND}")
    made = inside(FakeBackend(), credentials=Credentials(token_file=str(token), **ca.issue().save(tmp_path)))
    trusting = grpc.ssl_channel_credentials(ca.pem)
    with grpc.secure_channel(made.target, trusting) as channel:
        stream = channel.stream_stream(names.method("ModelStreamInfer"))
        endless = stream(requests, metadata=bearer(FIRST), timeout=TIMEOUT_S)
        next(endless)
        with monkeypatch.context() as patched:
            failures: list[str] = []
            patched.setattr(os, "memfd_create", lambda name: fail(failures))
            put(token, SECOND)
            fresh = [("grpc.use_local_subchannel_pool", 1)]
            with grpc.secure_channel(made.target, trusting, fresh) as other:
                assert ask(other, names.method("ServerReady"), bearer(SECOND)) == "OK", "no handshake any more"
            until(lambda: len(failures) > 5, 60)  # in handshakes and for calls, and then by the task, again and again
        assert caplog.text.count("RuntimeError: no descriptor is left") == 2, "once in words, once in its traceback"
        try:
            assert code_of(lambda: list(endless)) == "OK", "the stream of a revoked token goes on"
        finally:
            requests.ended.set()


class StillOpen:
    """Requests of a student that keeps its stream open."""

    def __init__(self, requests: list[bytes]) -> None:
        self._requests, self.ended = iter(requests), threading.Event()

    def __iter__(self) -> StillOpen:
        return self

    def __next__(self) -> bytes:
        for request in self._requests:
            return request
        self.ended.wait(TIMEOUT_S)
        raise StopIteration


def fail(failures: list[str]) -> int:
    failures.append("memfd_create")
    raise RuntimeError("no descriptor is left")


def test_connections_age_with_mutual_tls(inside: StartInside, tmp_path: Path) -> None:
    """A certificate that is taken no more is of no use for ever on a connection that exists."""
    ca, clients = Authority(), Authority("clients")
    told = Credentials(ca=clients.save(tmp_path, "clients"), **ca.issue().save(tmp_path))
    made = inside(FakeBackend(), credentials=told, max_connection_age_s=1.0)
    shown = clients.issue("student")
    channel_credentials = grpc.ssl_channel_credentials(ca.pem, shown.key, shown.cert)
    with grpc.secure_channel(made.target, channel_credentials) as channel:
        ready = names.method("ServerReady")
        assert ask(channel, ready) == "OK"
        Authority("others").save(tmp_path, "clients")
        until(lambda: ask(channel, ready) == "UNAVAILABLE")
