"""TLS and tokens of whole commands: a registry that lies, Triton behind a proxy, sockets, and what is said aloud."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
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
from edl.testing import LocalTeacher
from tests.certificates import Authority, put
from tests.plugins_triton import TritonFactory

TOKEN = "token-of-a-test-0123456789"
REFUSED_S = 4.0
"""For a teacher to refuse a student, in its own words: on a busy machine it may have no turn for a second or two."""


@pytest.fixture
def ca() -> Authority:
    return Authority()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/discovery.sqlite"


def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def ask(teachers: Any, credentials: Credentials, output: str = "y", timeout_s: float = 30.0) -> list[Any]:
    """Outputs for ones."""
    options = Options(teacher_timeout_s=timeout_s, credentials=credentials)
    with DistillReader(["x"], [output], teachers=teachers, options=options) as reader:
        reader.set_batch_generator(lambda: ((np.ones((4, 4), np.float32),) for _ in range(3)))
        return [answer for _, answer in reader()]


def serving(folder: Path, ca: Authority, *hosts: str) -> dict[str, str]:
    saved = ca.issue(*hosts).save(folder, "teacher")
    return {"tls-cert": saved["cert"], "tls-key": saved["key"]}


LIES = {
    "plain": "does not speak TLS",
    "other name": "is for another name ('impostor.example', '127.0.0.1'), not for 'teacher.example'",
    "other CA": "is signed by no CA in",
}


@pytest.mark.parametrize("lie", [*LIES, ""])
def test_registry_that_lies_gets_no_data(tmp_path: Path, url: str, ca: Authority, lie: str) -> None:
    """It sends students to a host of its own: without TLS, with a certificate for itself, or of another CA."""
    options: dict[str, Any] = {"metrics-port": 0}
    if lie != "plain":
        issuer = Authority("other") if lie == "other CA" else ca
        name = "impostor.example" if lie == "other name" else "teacher.example"
        options |= serving(tmp_path, issuer, name, "127.0.0.1")
    told = Credentials(ca=ca.save(tmp_path), server_name="teacher.example")
    with LocalTeacher("echo", serve=options) as named, open_registry(url) as registry, contextlib.ExitStack() as stack:
        instance = Instance("teachers", "t1", "127.0.0.1", named.port, model="m", meta={"tls": "0"})
        stack.enter_context(registry.register(instance))
        if not lie:
            assert ask(Teachers("teachers", discovery=url), told)
            assert served(named) > 0, "what else the test does would show nothing"
            return
        with pytest.raises(NoTeacherError) as caught:
            ask(Teachers("teachers", discovery=url), told, timeout_s=REFUSED_S)
        assert LIES[lie] in str(caught.value)
        assert served(named) == 0, "training data went to a host that the registry named"


def served(teacher: LocalTeacher) -> float:
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{teacher.metrics_port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("edl_teacher_rows_total"))


def test_discovery_tells_of_tls(tmp_path: Path, url: str, ca: Authority) -> None:
    with LocalTeacher("echo", service="teachers", discovery=url, serve=serving(tmp_path, ca)):
        with open_registry(url) as registry:
            (found,) = registry.snapshot("teachers").instances
        assert found.meta[names.TLS_META] == "1"
        answers = ask(Teachers("teachers", discovery=url), Credentials(ca=ca.save(tmp_path)))
    assert all((answer == 1).all() for answer in answers)


def test_unix_socket_with_tls(tmp_path: Path, ca: Authority) -> None:
    socket = tmp_path / "teacher.sock"
    with LocalTeacher("echo", serve={**serving(tmp_path, ca, "localhost"), "uds": socket}):
        assert ask([f"unix:{socket}"], Credentials(ca=ca.save(tmp_path)))
        with pytest.raises(NoTeacherError, match="speaks TLS, and this side has no CA set"):
            ask([f"unix:{socket}"], Credentials(), timeout_s=REFUSED_S)


def test_shared_memory_with_tls_and_token(tmp_path: Path, ca: Authority) -> None:
    token = put(tmp_path / "token", TOKEN)
    serve = {**serving(tmp_path, ca, "127.0.0.1"), "token-file": token, "metrics-port": 0}
    with LocalTeacher("echo", serve=serve, width=40_000) as teacher:
        told = Options(credentials=Credentials(ca=ca.save(tmp_path), token_file=token))
        with DistillReader(["x"], ["y"], teachers=[teacher.endpoint], options=told) as reader:
            reader.set_batch_generator(lambda: ((np.full((4, 40_000), i, np.float32),) for i in range(50)))
            for x, y in reader():
                assert (x == y).all()
            (engine,) = reader._session.labeller._engines  # type: ignore[union-attr]
            regions = next(link.shares_memory for link in engine._pool.connections.values())
        assert regions, "shared memory was not used"


def test_token_is_not_sent_into_the_open(tmp_path: Path) -> None:
    """To an address of RFC 5737, which nobody has: it is not even tried."""
    told = Credentials(token_file=put(tmp_path / "token", TOKEN))
    with pytest.raises(NoTeacherError, match=r"192\.0\.2\.1:8500 gets no token over a connection without TLS"):
        ask(["192.0.2.1:8500"], told, timeout_s=1.0)


WORDS = {
    (): "without TLS and tokens: whoever reaches this port can use the model",
    ("token",): "without TLS: tokens and data can be read on the network",
    ("tls",): "with TLS, for everybody",
    ("tls", "token"): "",
}


@pytest.mark.parametrize("chosen", WORDS, ids=lambda chosen: "-".join(chosen) or "nothing")
def test_open_teacher_says_so(tmp_path: Path, ca: Authority, chosen: tuple[str, ...]) -> None:
    serve: dict[str, Any] = {"host": "0.0.0.0", "advertise": "127.0.0.1"}
    if "token" in chosen:
        serve |= {"token-file": put(tmp_path / "token", TOKEN), "allow-insecure-tokens": True}
    if "tls" in chosen:
        serve |= serving(tmp_path, ca)
    with LocalTeacher("echo", serve=serve) as teacher:
        lines = [line for line in teacher.log.splitlines() if "listening on 0.0.0.0" in line]
    assert len(lines) == bool(WORDS[chosen])
    assert not lines or WORDS[chosen] in lines[0]


def test_teacher_of_this_host_is_quiet() -> None:
    with LocalTeacher("echo") as teacher:
        assert "without TLS" not in teacher.log


def test_bad_files_show_before_the_model(tmp_path: Path, ca: Authority) -> None:
    saved = serving(tmp_path, ca)
    put(tmp_path / "teacher.key", ca.issue().key)
    flags = [f"--{name}={value}" for name, value in saved.items()]
    command = [sys.executable, "-m", "edl", "serve", "--callable", "nowhere:predict", "--model", "m", *flags]
    done = subprocess.run([*command, "--discovery", "none"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "does not match certificate" in done.stderr
    assert "nowhere" not in done.stderr


COMMANDS = [
    ["serve", "--callable", "a:b", "--model", "m"],
    ["register", "127.0.0.1:1", "--model", "m"],
    ["label", "x.npz", "--inputs", "x", "--outputs", "y", "--output", "z", "--teachers", "127.0.0.1:1"],
    ["bench", "reader", "--teachers", "127.0.0.1:1"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("given", [["--token", TOKEN], [f"--token={TOKEN}"]], ids=["apart", "joined"])
def test_token_on_the_command_line(command: list[str], given: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "edl", *command, *given], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--token-file with a path" in done.stderr
    assert TOKEN not in done.stdout + done.stderr


class Proxy:
    """What stands before a Triton: it speaks TLS, looks for the token, and passes the bytes on."""

    def __init__(self, target: str, ca: Authority) -> None:
        self.refused = self.passed = 0
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
        self.passed += 1
        try:
            answer: bytes = self._target.unary_unary(method)(data, timeout=30)
        except grpc.RpcError as exc:
            failure: Any = exc
            context.abort(failure.code(), failure.details())
        return answer


@pytest.fixture
def proxied(triton: TritonFactory, ca: Authority) -> Iterator[Proxy]:
    made = Proxy(triton.start("sums").endpoint, ca)
    yield made
    made.close()


@pytest.mark.triton
def test_triton_behind_a_proxy(tmp_path: Path, url: str, ca: Authority, proxied: Proxy) -> None:
    """A reader, and `edl register`, speak TLS to it and show the token with each call."""
    saved, token = ca.save(tmp_path), put(tmp_path / "token", TOKEN)
    command = [sys.executable, "-m", "edl", "register", proxied.endpoint, "--model", "sums", "--discovery", url]
    log = tmp_path / "register.log"
    with contextlib.ExitStack() as stack:
        process = subprocess.Popen(
            [*command, "--tls-ca", saved, "--token-file", token], stderr=stack.enter_context(log.open("wb"))
        )
        stack.callback(process.wait)
        stack.callback(process.terminate)
        registry = stack.enter_context(open_registry(url))
        until(lambda: registry.snapshot("sums").instances)
        assert registry.snapshot("sums").instances[0].meta[names.TLS_META] == "1"
        answers = ask(Teachers("sums", discovery=url), Credentials(ca=saved, token_file=token), "logits")
        assert all((answer == 4).all() for answer in answers)
        assert proxied.refused == 0
        with pytest.raises(NoTeacherError, match=r"refuses this student \(UNAUTHENTICATED\): not without a token"):
            ask(Teachers("sums", discovery=url), Credentials(ca=saved), "logits", timeout_s=REFUSED_S)


@pytest.mark.parametrize("wrong", ["token", "CA", "nothing"])
def test_register_says_what_is_wrong(tmp_path: Path, url: str, ca: Authority, wrong: str) -> None:
    token = put(tmp_path / "token", TOKEN)
    serve = {**serving(tmp_path, ca), "token-file": token}
    told = {
        "token": ["--tls-ca", ca.save(tmp_path)],
        "CA": ["--tls-ca", Authority().save(tmp_path, "other"), "--token-file", token],
        "nothing": [],
    }
    words = {
        "token": "no token: this teacher takes",
        "CA": "signed by no CA in",
        "nothing": "speaks TLS, and this side",
    }
    log = tmp_path / "register.log"
    with LocalTeacher("echo", serve=serve) as teacher, log.open("wb") as file:
        command = [sys.executable, "-m", "edl", "register", teacher.endpoint, "--model", "echo", "--discovery", url]
        process = subprocess.Popen([*command, *told[wrong]], stderr=file)
        try:
            until(lambda: words[wrong] in log.read_text())
        finally:
            process.kill()
            process.wait()
    assert TOKEN not in log.read_text()
