"""Tokens and TLS of a teacher: who may ask it, when that ends, what it says aloud, and what is on each wire."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.cli import main
from edl.discovery import Instance, Registry
from edl.distill import DistillReader, Options, Teachers
from edl.errors import NoTeacherError
from edl.protocol import names
from edl.protocol.transport import grpc
from edl.settings import Credentials, LoadSettings
from edl_serving import admission as authentication
from edl_serving.registration import ReadyFile, RegistrationSettings, TeacherRegistration
from tests.certificates import Authority, put
from tests.fast.serving.conftest import TIMEOUT_S, StartInside, request_bytes
from tests.fast.serving.fakes import FakeBackend, five_logits
from tests.waiting import wait_until

FIRST, SECOND = "first-token-0123456789", "second-token-0123456789"
METHODS = [
    *("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelConfig", "RepositoryIndex"),
    *("SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister", "ModelInfer"),
]
X = request_bytes({"x": np.ones((2, 4), np.float32)})


@pytest.fixture
def ca() -> Authority:
    return Authority()


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    return put(tmp_path / "tokens", f"# of the first team\n{FIRST}\n\n# of the second\n{SECOND}\n")


@pytest.fixture
def channel(inside: StartInside, token_file: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(inside(FakeBackend(), credentials=Credentials(token_file=token_file)).target) as channel:
        yield channel


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def ask(channel: grpc.Channel, path: str, metadata: Any = (), data: bytes = b"") -> str:
    """The status of a call, in whose words no token stands."""
    try:
        channel.unary_unary(path)(data, metadata=metadata, timeout=TIMEOUT_S)
    except grpc.RpcError as exc:
        failure: Any = exc
    else:
        return "OK"
    assert not any(secret in str(failure.details()) for secret in (FIRST, SECOND)), "a token in the words of a refusal"
    return str(failure.code().name)


WRONG = [
    [("authorization", f"Basic {FIRST}")],
    [("authorization", FIRST)],
    [("authorization", "Bearer ")],
    *map(bearer, (FIRST[:-1], FIRST + "0", "# of the first team", f"{FIRST} {SECOND}", FIRST.upper())),
    [*bearer(FIRST), *bearer(SECOND)],
]


def test_no_method_without_a_token(channel: grpc.Channel) -> None:
    for method in (*METHODS, "NoSuchMethod"):
        path = names.method(method)
        assert ask(channel, path) == "UNAUTHENTICATED", method
        assert ask(channel, path, bearer("third-token-0123456789")) == "UNAUTHENTICATED", method
        assert ask(channel, path, bearer(FIRST)) != "UNAUTHENTICATED", method
        assert ask(channel, path, bearer(SECOND)) != "UNAUTHENTICATED", method
    assert ask(channel, "/other.Service/Method") == "UNAUTHENTICATED", "which services there are is seen by strangers"
    for metadata in WRONG:
        assert ask(channel, names.method("ModelInfer"), metadata, X) == "UNAUTHENTICATED", metadata
    assert ask(channel, names.method("ModelInfer"), [("authorization", f"bearer {FIRST}")], X) == "OK"
    large = b"\0" * (64 << 20)
    assert ask(channel, names.method("ModelInfer"), data=large) == "UNAUTHENTICATED", "a refused call is not read"


@pytest.mark.parametrize("open_health", [True, False])
def test_health_may_need_none(inside: StartInside, token_file: str, open_health: bool) -> None:
    made = inside(FakeBackend(), credentials=Credentials(token_file=token_file), open_health=open_health)
    with grpc.insecure_channel(made.target) as channel:
        health = "/grpc.health.v1.Health/Check"
        assert ask(channel, health) == ("OK" if open_health else "UNAUTHENTICATED")
        assert ask(channel, health, bearer(FIRST)) == "OK"
        assert ask(channel, "/grpc.health.v1.HealthX/Check") == "UNAUTHENTICATED"


def test_connections_age_with_mutual_tls(inside: StartInside, tmp_path: Path, ca: Authority) -> None:
    """A certificate that is taken no more is of no use for ever on a connection that exists."""
    clients = Authority("clients")
    told = Credentials(ca=clients.save(tmp_path, "clients"), **ca.issue().save(tmp_path))
    made = inside(FakeBackend(), credentials=told, max_connection_age_s=1.0)
    shown = clients.issue("student")
    channel_credentials = grpc.ssl_channel_credentials(ca.pem, shown.key, shown.cert)
    with grpc.secure_channel(made.target, channel_credentials) as channel:
        ready = names.method("ServerReady")
        assert ask(channel, ready) == "OK"
        Authority("others").save(tmp_path, "clients")
        wait_until(lambda: ask(channel, ready) == "UNAVAILABLE")


def labels(teachers: Any, credentials: Credentials, timeout_s: float = TIMEOUT_S) -> Any:
    """What a student gets for ones, and whether it shares memory with its teacher."""
    options = Options(teacher_timeout_s=timeout_s, credentials=credentials)
    with DistillReader(["x"], ["logits"], teachers=teachers, options=options) as reader:
        reader.set_batch_generator(lambda: ((np.ones((4, 4), np.float32),) for _ in range(3)))
        found = np.concatenate([answer for _, answer in reader()])
        (engine,) = reader._session.labeller.engines  # type: ignore[union-attr]
        shared = any(link.shares_memory for link in engine.pool.connections.values())
    return found, shared


def test_registry_that_lies_gets_no_data(
    inside: StartInside, tmp_path: Path, url: str, registry: Registry, ca: Authority
) -> None:
    """It sends students to a host of its own, and says that TLS is not spoken there."""
    impostor = inside(FakeBackend())
    told = Credentials(ca=ca.save(tmp_path), server_name="teacher.example")
    instance = Instance("teachers", "t1", "127.0.0.1", impostor.port, model="m", meta={"tls": "0"})
    with registry.register(instance, 300.0):
        with pytest.raises(NoTeacherError):
            labels(Teachers("teachers", discovery=url), told, timeout_s=1.0)
        assert impostor.metric("edl_teacher_rows_total") == 0, "training data went to a host that the registry named"


def test_tls_beside_shared_memory(
    inside: StartInside, tmp_path: Path, url: str, registry: Registry, ca: Authority, token_file: str
) -> None:
    secured = Credentials(token_file=token_file, **ca.issue("127.0.0.1", "localhost").save(tmp_path))
    made = inside(FakeBackend(), credentials=secured)
    settings = RegistrationSettings("teachers", url, ttl_s=300.0, load=LoadSettings(publish=False))
    told = Credentials(ca=ca.save(tmp_path), token_file=token_file)
    wanted = five_logits({"x": np.ones((12, 4), np.float32)})["logits"]
    with ReadyFile(None) as file, TeacherRegistration(settings, "127.0.0.1", 0.0, file) as registration:
        registration.register(made.server)
        (found,) = registry.snapshot("teachers").instances
        assert found.meta[names.TLS_META] == "1"
        answers, shared = labels(Teachers("teachers", discovery=url), told)
        np.testing.assert_array_equal(answers, wanted)
        assert shared


WORDS = [
    ({}, "0.0.0.0", "without TLS and tokens: anyone who reaches it can use the model"),
    ({"token_file": "t"}, "0.0.0.0", "without TLS: tokens and data can be read on the network"),
    ({"cert": "c", "key": "k"}, "[::]", "with TLS, open to everyone"),
    ({"cert": "c", "key": "k", "token_file": "t"}, "0.0.0.0", ""),
    ({"cert": "c", "key": "k", "ca": "a"}, "0.0.0.0", ""),
    ({}, "127.0.0.1", ""),
]


@pytest.mark.parametrize(("told", "host", "words"), WORDS)
def test_open_teacher_says_so(told: dict[str, str], host: str, words: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        authentication.warn_of_no_credentials(host, Credentials(**told))
    assert len(caplog.records) == bool(words)
    assert words in caplog.text


def test_token_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (["--token", FIRST], [f"--token={FIRST}"]):
        assert main(["serve", "--callable", "a:b", "--model", "m", *given]) == 2
        said = capsys.readouterr()
        assert "--token-file" in said.err
        assert FIRST not in said.out + said.err
