"""The proxy before a teacher in this process, and `edl proxy` as a process: what clients get and are refused."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.cli import main
from edl.distill.compress import TopK
from edl.errors import ClosedError, SettingsError
from edl.proxy.completions import RequestRefusal, answer_head, answer_tail, encode_choice, read_request
from edl.proxy.server import ProxyServer, TokenGate
from edl.proxy.settings import ProxySettings
from edl.settings import Credentials
from edl.testing import LocalTeacher
from edl.testing.models import prefix_scores_of
from edl_serving.request_error import invalid_argument
from tests.fast.distill.sequences.language_model import VOCABULARY, NegativeModel, PrefixModel
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
FAULTY = VOCABULARY - 1  # a token whose prompts are answered with NaN
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
SEQUENCES = [np.random.default_rng(n).integers(0, FAULTY, n).tolist() for n in (1, 2, 30, 7, 120)]


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
        answers = super().predict_top_k(*arguments)
        if (arguments[0]["ids"] == FAULTY).any():
            answers["logprobs"].values[:] = np.nan
        return answers


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
def open_proxy(teacher: Inside, stack: contextlib.ExitStack) -> OpenProxy:
    """Opens proxies, and closes them."""

    def open_(**settings: Any) -> ProxyServer:
        defaults = {"services": {"m": teacher.target}, "port": 0, "top_k": K, "max_tokens": 2000}
        return stack.enter_context(ProxyServer(ProxySettings(**{**defaults, **settings})))

    return open_


def test_requests_of_trainers(open_proxy: OpenProxy) -> None:
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


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"max_tokens": 2}, 400, "generates nothing"),
    ({"model": "other"}, 404, "available: m"),
    ({"prompt_logprobs": 10}, 400, "max allowed: 9"),
    ({"prompt": [[1, VOCABULARY * 10**5]]}, 400, "out of vocabulary"),
    ({"prompt": [[1] * 201]}, 400, "at most 200"),
    ({"prompt": [[1] * 2001]}, 400, "at most 200"),
    ({"prompt_logprobs": 9, "max_tokens": 1}, 400, "set top_k=8"),
    ({"prompt": [[1] * 150] * 14}, 413, "2100 tokens"),
    ({"prompt": [[1]] * 130}, 413, "2080 tokens"),
]


def test_what_is_refused(open_proxy: OpenProxy, caplog: pytest.LogCaptureFixture) -> None:
    """With the reason in the body and in the status line, and in the log once."""
    port = open_proxy(top_k=9).port
    for changed, status, words in REFUSED * 2:
        body = json.dumps({**trl_request([[1, 2]], 2, "m"), **changed}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body)
        with pytest.raises(urllib.error.HTTPError, match=re.escape(words)) as refused:
            urllib.request.urlopen(request, timeout=DEADLINE_S)
        with refused.value as answer:
            assert answer.code == status
            assert words in json.load(answer)["error"]["message"]
        assert ask(port, trl_request([[1, 2]], 2, "m"))[0] == 200, "others are answered"
    assert caplog.text.count("generates nothing") == 1


def test_services_by_name_and_url(open_proxy: OpenProxy, teacher: Inside) -> None:
    """TRL's asynchronous trainer takes the first model of each URL, and asks that URL for it."""
    negative = Inside(NegativeModel())
    try:
        port = open_proxy(services={"math": teacher.target, "a/b": negative.target}).port
        assert [model["id"] for model in ask(port, path="/v1/models")[1]["data"]] == ["math", "a/b"]
        for name, sign in (("math", 1), ("a/b", -1)):
            wait_until(lambda name=name: ask(port, path=f"/{name}/health")[0] == 200)
            assert [model["id"] for model in ask(port, path=f"/{name}/v1/models")[1]["data"]] == [name]
            body = trl_request([SEQUENCES[3]], K, name)
            for path in ("/v1/completions", f"/{name}/v1/completions"):
                answer = ask(port, body, path)[1]
                check_choice(answer["choices"][0], SEQUENCES[3], K, sign=sign)
                assert answer["model"] == name
        for path, model, status in (
            ("/math/v1/completions", "a/b", 404),
            ("/other/v1/completions", None, 404),
            ("/v1/completions", None, 400),
            ("/math/v1/completions", None, 200),
        ):
            assert ask(port, {**trl_request([[1, 2]], 2, ""), "model": model}, path)[0] == status
    finally:
        negative.close()


def test_any_temperature(open_proxy: OpenProxy) -> None:
    port = open_proxy().port
    _, answer, _ = ask(port, {**trl_request([SEQUENCES[2]], K, "m"), "temperature": 2.0})
    whole = prefix_scores_of(np.asarray(SEQUENCES[2], np.int32), VOCABULARY).astype(float) / 2
    whole -= np.logaddexp.reduce(whole, axis=-1)[:, None]
    for row, entries in zip(whole, answer["choices"][0]["prompt_logprobs"][1:], strict=False):
        for token, entry in entries.items():
            assert entry["logprob"] == pytest.approx(row[int(token)], abs=1e-5)


def test_scorers_are_few(open_proxy: OpenProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those longest unused are closed."""
    monkeypatch.setattr("edl.proxy.scorers._MOST_OPEN", 2)
    port = open_proxy().port
    for k in (2, 3, 4, 2):
        assert ask(port, trl_request([[1, 2]], k, "m"))[0] == 200
    found = set(re.findall(r'reader="m k=(\d)', ask(port, path="/metrics")[1]))
    assert found == {"4", "2"}


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
        connection.sendall(HEAD % 10 + b"{")
    assert ask(port, trl_request([[1, 2]], 2, "m"))[0] == 200


def test_slow_bodies_stop_nobody(open_proxy: OpenProxy) -> None:
    port = open_proxy().port
    with contextlib.ExitStack() as connections:
        for length in (10, 100_000):
            for _ in range(40):
                connection = connections.enter_context(socket.create_connection(("127.0.0.1", port), 60))
                connection.sendall(HEAD % length + b"{")
            assert ask(port, trl_request([[1, 2]], 2, "m"), timeout_s=DEADLINE_S)[0] == 200


def test_bodies_of_clients_that_left_count(open_proxy: OpenProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is being read is held until it is read, though nobody waits for it: it takes a place as long."""
    entered, left = threading.Semaphore(0), threading.Event()

    def read_slowly(*_: Any) -> Any:
        entered.release()
        left.wait(DEADLINE_S)
        raise RequestRefusal(400, "read at last")

    monkeypatch.setattr("edl.proxy.server._READERS", 1)
    monkeypatch.setattr("edl.proxy.server.read_request", read_slowly)
    proxy = open_proxy(timeout_s=2.0)
    try:
        with socket.create_connection(("127.0.0.1", proxy.port), DEADLINE_S) as connection:
            connection.sendall(HEAD % 100_000 + b" " * 100_000)
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
    with socket.create_connection(("127.0.0.1", proxy.port), DEADLINE_S) as connection:
        connection.sendall(HEAD % len(body) + body)
        wait_until(lambda: "edl_proxy_tokens_held 120.0" in ask(proxy.port, path="/metrics")[1])
    wait_until(lambda: 'edl_proxy_requests_total{status="499"} 1.0' in ask(proxy.port, path="/metrics")[1])
    wait_until(lambda: "edl_proxy_tokens_held 0.0" in ask(proxy.port, path="/metrics")[1])
    model.released.set()
    assert ask(proxy.port, trl_request([SEQUENCES[4]], 2, "m"))[0] == 200


def test_no_teacher(open_proxy: OpenProxy) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        proxy = open_proxy(services={"m": f"127.0.0.1:{unused.getsockname()[1]}"}, teacher_timeout_s=0.5)
        status, answer, headers = ask(proxy.port, trl_request([[1, 2]], 2, "m"))
        assert (status, headers["Retry-After"]) == (503, "5"), answer
        for path in ("/health", "/health/", "/m/health"):
            status, answer, headers = ask(proxy.port, path=path)
            assert (status, headers["Retry-After"]) == (503, "5")
            assert "is live (127.0.0.1:" in answer["error"]["message"]
        assert ask(proxy.port, path="/livez")[0] == 200


def test_a_faulty_answer_stops_nobody(open_proxy: OpenProxy) -> None:
    port = open_proxy().port
    assert ask(port, trl_request([[1, FAULTY]], 1, "m"))[0] == 502
    assert ask(port, path="/health")[0] == 200
    assert ask(port, trl_request([[1, 2]], 1, "m"))[0] == 200


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
        ProxySettings({"s": "s"}, host="0.0.0.0", credentials=Credentials(token_file=str(tokens)))


def test_other_names_are_refused(open_proxy: OpenProxy) -> None:
    port = open_proxy(allowed_hosts=("here",)).port
    body = trl_request([[1, 2]], 2, "m")
    for host, status in (("rebound.example", 403), (f"localhost:{port}", 200), ("here", 200)):
        assert ask(port, body, headers={"Host": host})[0] == status
    for origin in ("http://evil.example", "null", "http://here"):  # the last is also a page with a rebound name
        assert ask(port, body, headers={"Host": "here", "Origin": origin})[0] == 403


def test_long_texts(open_proxy: OpenProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices that are encoded in a thread, in several pieces."""
    for module in ("server", "completions"):
        monkeypatch.setattr(f"edl.proxy.{module}.PIECE_ENTRIES", 64)
    port = open_proxy().port
    for k in (K, 0):
        _, answer, _ = ask(port, trl_request(SEQUENCES, k, "m"))
        for choice, sequence in zip(answer["choices"], SEQUENCES, strict=True):
            check_choice(choice, sequence, k)


class Proxy:
    """An `edl proxy` process."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "edl", "proxy", *arguments, "--port", "0", "--top-k", str(K), "--model", "m"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://127.0.0.1:(\d+)/", line)
        assert found, line
        self.port = int(found[1])

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_it_waits_for_a_teacher_and_drains(tmp_path: Path) -> None:
    """On SIGTERM what is under way is answered, nothing new is taken, and the process ends with 0."""
    url, model = f"sqlite:///{tmp_path}/discovery.sqlite", f"{PrefixModel.__module__}:PrefixModel"
    with (
        LocalTeacher(model, service="lm", discovery=url, serve={"ttl": "5m"}, wait=False) as teacher,
        contextlib.closing(Proxy("lm", "--discovery", url, "--teacher-timeout", "90", "--drain", "90")) as proxy,
        ThreadPoolExecutor(1) as client,
    ):
        first = client.submit(ask, proxy.port, trl_request([[1, 2, 3]], K, "m"))
        status, answer, _ = first.result(DEADLINE_S)
        assert status == 200, answer
        check_choice(answer["choices"][0], [1, 2, 3], K)
        assert ask(proxy.port, path="/health")[0] == 200
        wait_until(lambda: "edl_proxy_tokens_held 0.0" in ask(proxy.port, path="/metrics")[1])  # of that request
        teacher.pause()
        waiting = client.submit(ask, proxy.port, trl_request([[3, 4, 5]], K, "m"))
        held = "edl_proxy_tokens_held 16.0"  # a prompt counts as so many at least
        wait_until(lambda: held in ask(proxy.port, path="/metrics")[1])
        proxy.process.send_signal(signal.SIGTERM)
        wait_until(lambda: ask(proxy.port, path="/health")[0] == 503)
        status, answer, headers = ask(proxy.port, trl_request([[1, 2]], K, "m"))
        assert (status, headers["Connection"]) == (503, "close"), answer
        teacher.resume()
        assert waiting.result(DEADLINE_S)[0] == 200
        assert proxy.process.wait(DEADLINE_S) == 0


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--top-k", "0"], "top_k=0"),
        (["--host", "192.0.2.1"], "cannot listen"),
        (["b=c", "b=d"], "each name once"),
        (["b", "--model", "m"], "NAME=SERVICE"),
    ):
        assert main(["proxy", "127.0.0.1:1", *arguments, "--port", "0"]) == 2
        assert words in capsys.readouterr().err


GOOD = {"model": "m", "prompt": [[1, 2], [3]], "max_tokens": 1, "prompt_logprobs": 2}

NEUTRAL: dict[str, list[Any]] = {
    "model": [None],
    "temperature": [1, 0.0],
    "max_tokens": [0],
    "n": [1],
    "prompt_embeds": [None, False],
    "truncate_prompt_tokens": [None, False],
}

WRONG_PROMPTS: tuple[Any, ...] = ([], [[]], "a", ["a"], [1.0], [True], [[1], 2], None, {}, [-1])


def read(**changed: Any) -> Any:
    return read_request(json.dumps({**GOOD, **changed}).encode(), ["m"], 8)


@pytest.mark.parametrize(("top_k", "room"), [(1, 1 << 18), (128, 1 << 17), (1 << 16, 4096)])
def test_room_is_for_labels_of_any_k(top_k: int, room: int) -> None:
    assert ProxySettings({}, top_k=top_k).room == room
    assert ProxySettings({}, top_k=top_k, max_tokens=7).room == 7
    found = read(prompt=[[1]] * 100 + [[2] * 40])
    assert (found.tokens, found.weight) == (140, 1640), "each has arrays of its own, however short it is"


def test_prompts_and_k() -> None:
    found = read()
    assert [ids.tolist() for ids in found.prompts] == [[1, 2], [3]]
    assert (found.k, found.tokens, found.prompts[0].dtype) == (2, 3, np.int32)
    assert [ids.tolist() for ids in read(prompt=[7, 8]).prompts] == [[7, 8]]
    assert read(prompt_logprobs=None, logprobs=3).k == 3
    assert read(logprobs=True, prompt_logprobs=4).k == 4
    for name, values in NEUTRAL.items():
        for value in values:
            assert read(**{name: value}).tokens == 3


@pytest.mark.parametrize(
    "changed",
    [
        *({"prompt": wrong} for wrong in WRONG_PROMPTS),
        *({"prompt": [2**31]}, {"prompt": [10**400]}),
        *({"prompt_logprobs": wrong} for wrong in (9, -1, True, 1.0)),
        {"prompt_logprobs": None},
        *({"max_tokens": wrong} for wrong in (2, -1, True)),
        *({"temperature": wrong} for wrong in (0.001, 101, True, "1", float("nan"))),
        {"prompt_logprobs": None, "logprobs": 2, "echo": True},
        *({"truncate_prompt_tokens": 0}, {"prompt_embeds": "x"}),
        *({"stream": True}, {"n": 2}, {"best_of": 3}),
    ],
)
def test_refusals(changed: dict[str, Any]) -> None:
    with pytest.raises(RequestRefusal) as refused:
        read(**changed)
    assert refused.value.status == 400
    assert refused.value.message.isprintable()


def test_choices_are_vllms() -> None:
    prompt = np.array([4, 7, 9], np.int32)
    ids = np.array([[7, 1], [2, 1], [0, 1]], np.int32)
    values = np.array([[-0.1, -3.0], [-0.5, -np.inf], [-1, -2]], np.float32)
    own = np.array([[-0.1], [-8.25], [0.0]], np.float32)
    choice = json.loads(b"".join(encode_choice(3, prompt, TopK(ids, values, np.zeros(3, np.float32)), own, 2, True)))
    assert choice["index"] == 3
    assert choice["prompt_token_ids"] == [4, 7, 9]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert {token: entry["rank"] for token, entry in second.items()} == {"7": 1, "1": 2}
    assert np.float32(second["7"]["logprob"]) == np.float32(-0.1)
    assert third["9"] == {"logprob": -8.25, "rank": 3, "decoded_token": None}
    assert third["1"]["logprob"] == -9999.0
    whole = json.loads(answer_head("1", 5, 'a"b') + answer_tail(3))
    assert (whole["model"], whole["choices"], whole["usage"]["prompt_tokens"]) == ('a"b', [], 3)


def test_room_is_given_in_turn() -> None:
    async def run() -> list[int]:
        gate = TokenGate(10)
        order: list[int] = []

        async def come(number: int, tokens: int) -> None:
            async with gate.room(tokens, DEADLINE_S):
                order.append(number)
                assert gate.inside <= 10
                for _ in range(10):
                    await asyncio.sleep(0)

        tasks = [asyncio.ensure_future(come(number, tokens)) for number, tokens in enumerate((8, 8, 1, 10, 2))]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (gate.inside, gate.waiting) == (0, 0)
        async with gate.room(10, DEADLINE_S):
            with pytest.raises(RequestRefusal, match="no room"):
                async with gate.room(1, 0.01):
                    pass
            assert (gate.inside, gate.waiting) == (10, 0)
        with pytest.raises(RequestRefusal, match="11 tokens"):
            async with gate.room(11, DEADLINE_S):
                pass
        return order

    assert asyncio.run(run()) == [0, 1, 3, 4]
