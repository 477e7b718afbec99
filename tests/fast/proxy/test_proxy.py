"""The proxy before a teacher in this process: what clients get, and what they are refused."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from edl.errors import ClosedError, SettingsError
from edl.proxy.completion_request import RequestRefusal
from edl.proxy.server import ProxyServer
from edl.proxy.settings import ProxySettings
from edl.settings import Credentials
from edl_serving.request_error import invalid_argument
from tests.fast.distill.sequences.language_model import VOCABULARY, PrefixModel
from tests.fast.proxy.clients import (
    ask,
    axolotl_request,
    check_choice,
    swift_request,
    trl_async_request,
    trl_request,
)
from tests.fast.serving.conftest import Inside
from tests.waiting import DEADLINE_S, wait_until

OpenProxy = Callable[..., ProxyServer]
K = 5
SEQUENCES = [np.random.default_rng(n).integers(0, VOCABULARY, n).tolist() for n in (1, 2, 30, 7, 120)]


class GatedModel(PrefixModel):
    """Answers when it may."""

    def __init__(self) -> None:
        super().__init__(max_sequence=200)
        self.released = threading.Event()
        self.released.set()

    def check_inputs(self, inputs: Any, temperature: float) -> None:
        if inputs["ids"].max() >= VOCABULARY:
            raise invalid_argument("an id out of vocabulary")

    def predict_top_k(self, *arguments: Any) -> Any:
        assert self.released.wait(DEADLINE_S)
        return super().predict_top_k(*arguments)


@pytest.fixture(scope="module")
def model() -> GatedModel:
    return GatedModel()


@pytest.fixture(scope="module")
def teacher(model: GatedModel) -> Iterator[Inside]:
    found = Inside(model, max_batch_rows=512)
    yield found
    model.released.set()
    found.close()


@pytest.fixture
def open_proxy(teacher: Inside) -> Iterator[OpenProxy]:
    """Opens proxies, and closes them."""
    opened: list[ProxyServer] = []

    def open_(**settings: Any) -> ProxyServer:
        defaults = {"service": teacher.target, "model": "m", "port": 0, "top_k": K, "max_tokens": 2000}
        opened.append(ProxyServer(ProxySettings(**{**defaults, **settings})))
        return opened[-1]

    yield open_
    for proxy in opened:
        proxy.close()


def test_trl_requests(open_proxy: OpenProxy) -> None:
    port = open_proxy().port
    for k in (K, 2, 0):
        status, answer, _ = ask(port, trl_request(SEQUENCES, k, "m"))
        assert status == 200, answer
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(SEQUENCES)))
        for choice, sequence in zip(answer["choices"], SEQUENCES, strict=True):
            check_choice(choice, sequence, k)
        assert answer["usage"]["prompt_tokens"] == sum(map(len, SEQUENCES))
    status, answer, _ = ask(port, trl_async_request(SEQUENCES[2], K, "m"))
    check_choice(answer["choices"][0], SEQUENCES[2], K)


def test_requests_of_other_trainers(open_proxy: OpenProxy) -> None:
    port = open_proxy().port
    _, answer, _ = ask(port, axolotl_request(SEQUENCES, K))
    for choice, sequence in zip(answer["choices"], SEQUENCES, strict=True):
        check_choice(choice, sequence, K)
    status, answer, _ = ask(port, {"messages": []}, "/v1/chat/completions")
    assert (status, answer["error"]["type"]) == (404, "NotFoundError"), "ms-swift takes the other endpoint then"
    _, answer, _ = ask(port, swift_request(SEQUENCES[3], K, "m"))
    check_choice(answer["choices"][0], SEQUENCES[3], K)


def test_what_clients_look_at_first(open_proxy: OpenProxy) -> None:
    proxy = open_proxy()
    with pytest.raises(ClosedError, match="started before"):
        proxy.start()
    port = proxy.port
    wait_until(lambda: ask(port, path="/health")[0] == 200)
    _, models, _ = ask(port, path="/v1/models")
    assert models["data"][0]["id"] == "m"
    assert models["data"][0]["max_model_len"] == 201
    assert ask(port, path="/get_world_size")[1] == {"world_size": 1}
    assert ask(port, path="/server_info")[0] == 404, "TRL says then that weights cannot be sent"


REFUSED = [
    ({"max_tokens": 2}, 400, "generates nothing"),
    ({"model": "other"}, 404, "'m'"),
    ({"prompt_logprobs": K + 1}, 400, f"max allowed: {K}"),
    ({"prompt": [[1, VOCABULARY * 10**5]]}, 400, "out of vocabulary"),
    ({"prompt": [[1] * 201]}, 400, "201"),
    ({"prompt": [[1] * 150] * 14}, 413, "2100 tokens"),
    ({"prompt": [[1]] * 130}, 413, "2080 tokens"),
]


def test_what_is_refused(open_proxy: OpenProxy) -> None:
    port = open_proxy().port
    for changed, status, words in REFUSED:
        found, answer, _ = ask(port, {**trl_request([[1, 2]], 2, "m"), **changed})
        assert found == status, answer
        assert words in answer["error"]["message"]
        assert ask(port, trl_request([[1, 2]], 2, "m"))[0] == 200, "others are answered"


def test_garbage(open_proxy: OpenProxy) -> None:
    port = open_proxy().port
    for body in (b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"prompt": [[1]], "prompt_logprobs": 1e400}'):
        status, answer, _ = ask(port, body)
        assert status == 400, answer
    assert ask(port, b"x" * (2 << 20))[0] == 413
    good = json.dumps(trl_request([[1, 2]], 2, "m")).encode()
    packed = gzip.compress(good + b" " * (1 << 20))  # it would have megabytes before its length is known
    status, answer, _ = ask(port, packed, headers={"Content-Encoding": "gzip"})
    assert (status, "Content-Encoding" in answer["error"]["message"]) == (415, True), answer
    assert ask(port, good, headers={"Content-Encoding": "identity"})[0] == 200
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
    assert ask(port, trl_request([[1, 2]], 2, "m"))[0] == 200


def test_slow_bodies_stop_nobody(open_proxy: OpenProxy) -> None:
    port = open_proxy().port
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n{"
    with contextlib.ExitStack() as connections:

        def open_slow(length: int) -> None:
            for _ in range(40):
                connection = connections.enter_context(socket.create_connection(("127.0.0.1", port), 60))
                connection.sendall(head % length)

        open_slow(10)
        assert ask(port, trl_request([[1, 2]], 2, "m"), timeout_s=DEADLINE_S)[0] == 200
        open_slow(100_000)
        assert ask(port, trl_request([[1, 2]], 2, "m"), timeout_s=DEADLINE_S)[0] == 200


def test_bodies_of_clients_that_left_count(open_proxy: OpenProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being read is held until it is read, though nobody waits for it: it takes a place as long."""
    entered, left = threading.Semaphore(0), threading.Event()

    def read_slowly(*_: Any) -> Any:
        entered.release()
        left.wait(DEADLINE_S)
        raise RequestRefusal(400, "read at last")

    monkeypatch.setattr("edl.proxy.app._READERS", 1)
    monkeypatch.setattr("edl.proxy.app.read_request", read_slowly)
    proxy = open_proxy(timeout_s=2.0)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
    try:
        with socket.create_connection(("127.0.0.1", proxy.port), DEADLINE_S) as connection:
            connection.sendall(head + b" " * 100_000)
            assert entered.acquire(timeout=DEADLINE_S)
        status, answer, _ = ask(proxy.port, b" " * 100_000, timeout_s=DEADLINE_S)
        assert (status, "large bodies" in answer["error"]["message"]) == (503, True), answer
    finally:
        left.set()
    wait_until(lambda: ask(proxy.port, b" " * 100_000)[1]["error"]["message"] == "read at last")


def test_clients_that_go_away(open_proxy: OpenProxy, model: GatedModel) -> None:
    """Their tokens are let go of, though no teacher has answered."""
    proxy = open_proxy(max_tokens=130)
    model.released.clear()
    body = json.dumps(trl_request([SEQUENCES[4]], 2, "m")).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", proxy.port), DEADLINE_S) as connection:
        connection.sendall(head + body)
        wait_until(lambda: "edl_proxy_tokens_held 120.0" in ask(proxy.port, path="/metrics")[1])
    wait_until(lambda: 'edl_proxy_requests_total{status="499"} 1.0' in ask(proxy.port, path="/metrics")[1])
    wait_until(lambda: "edl_proxy_tokens_held 0.0" in ask(proxy.port, path="/metrics")[1])
    model.released.set()
    assert ask(proxy.port, trl_request([SEQUENCES[4]], 2, "m"))[0] == 200


def test_no_teacher(open_proxy: OpenProxy) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        proxy = open_proxy(service=f"127.0.0.1:{unused.getsockname()[1]}", teacher_timeout_s=0.5)
        status, answer, headers = ask(proxy.port, trl_request([[1, 2]], 2, "m"))
        assert (status, headers["Retry-After"]) == (503, "5"), answer
        status, _, headers = ask(proxy.port, path="/health")
        assert (status, headers["Retry-After"]) == (503, "5")
        assert ask(proxy.port, path="/livez")[0] == 200


def test_answers_in_time(open_proxy: OpenProxy, model: GatedModel) -> None:
    proxy = open_proxy(timeout_s=1.0)
    wait_until(lambda: ask(proxy.port, path="/health")[0] == 200)
    model.released.clear()
    try:
        status, answer, _ = ask(proxy.port, trl_request([[1, 2]], 2, "m"))
        assert status == 504, answer
    finally:
        model.released.set()


def test_tokens_are_asked_for(open_proxy: OpenProxy, tmp_path: Any) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("0123456789abcdef\n")
    tokens.chmod(0o600)
    port = open_proxy(credentials=Credentials(token_file=str(tokens))).port
    body = trl_request([[1, 2]], 2, "m")
    assert ask(port, body)[0] == 401
    assert ask(port, body, headers={"Authorization": "Bearer 0123456789abcdee"})[0] == 401
    assert ask(port, body, headers={"Authorization": "Bearer 0123456789abcdef"})[0] == 200
    assert ask(port, path="/metrics")[0] == 401
    assert ask(port, path="/livez")[0] == 200
    with pytest.raises(SettingsError, match="without TLS"):
        ProxySettings("s", host="0.0.0.0", credentials=Credentials(token_file=str(tokens)))


def test_other_names_are_refused(open_proxy: OpenProxy) -> None:
    port = open_proxy(allowed_hosts=("here",)).port
    body = trl_request([[1, 2]], 2, "m")
    for host, status in (("rebound.example", 403), (f"localhost:{port}", 200), ("here", 200)):
        assert ask(port, body, headers={"Host": host})[0] == status
    for origin, status in (("http://evil.example", 403), ("null", 403), ("http://here", 200)):
        assert ask(port, body, headers={"Host": "here", "Origin": origin})[0] == status


def test_long_texts(open_proxy: OpenProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices that are encoded in a thread, in several pieces."""
    for module in ("app", "completion_response"):
        monkeypatch.setattr(f"edl.proxy.{module}.PIECE_ENTRIES", 64)
    port = open_proxy().port
    for k in (K, 0):
        _, answer, _ = ask(port, trl_request(SEQUENCES, k, "m"))
        for choice, sequence in zip(answer["choices"], SEQUENCES, strict=True):
            check_choice(choice, sequence, k)
