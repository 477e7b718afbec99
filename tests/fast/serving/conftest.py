"""Teacher servers for tests: as processes, and on an event loop in a thread of the test's own process."""

from __future__ import annotations

import asyncio
import json
import queue
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import pytest

from edl.protocol import codec, kserve, names, tensors
from edl.protocol.transport import grpc
from edl_serving import Array, Backend, ServerSettings, TeacherServer
from edl_serving.lifecycle import ServerState
from tests.plugins_consul import free_ports
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 90.0


def until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Poll until `condition` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.005)


OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # else two clients of one server share a connection
]


class Client:
    """The methods of a server over a plain channel; bytes in, bytes out."""

    def __init__(self, target: str) -> None:
        self.channel = grpc.insecure_channel(target, options=OPTIONS)
        self.infer_bytes = self.channel.unary_unary(names.method("ModelInfer"))

    def ask(self, method: str, **fields: Any) -> Any:
        """Any method but inference."""
        request = getattr(kserve, f"{method}Request")(**fields)
        call = self.channel.unary_unary(
            names.method(method),
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=getattr(kserve, f"{method}Response").FromString,
        )
        return call(request, timeout=TIMEOUT_S)

    def start(self, x: Array, timeout_s: float = TIMEOUT_S, **parameters: int | float | str) -> Any:
        """Ask for the outputs of `x`; a future."""
        return self.infer_bytes.future(request_bytes({"x": x}, **parameters), timeout=timeout_s)

    def infer(self, x: Array, **parameters: int | float | str) -> dict[str, Array]:
        """The outputs of `x`."""
        return outputs_of(self.start(x, **parameters).result())

    def close(self) -> None:
        self.channel.close()


def request_bytes(arrays: Mapping[str, Array], **parameters: int | float | str) -> bytes:
    header = kserve.ModelInferRequest(model_name="m")
    for name, array in arrays.items():
        header.inputs.add(name=name, datatype=tensors.datatype_of(array.dtype), shape=array.shape)
    for name, value in parameters.items():
        field = {int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        header.parameters[name].CopyFrom(kserve.InferParameter(**{field: value}))
    return codec.encode_request(header, [tensors.to_raw(array) for array in arrays.values()])


def outputs_of(answer: bytes) -> dict[str, Array]:
    header, raw = codec.decode_response(answer)
    return {
        output.name: tensors.from_raw(output.datatype, output.shape, data)
        for output, data in zip(header.outputs, raw, strict=True)
    }


class Process:
    """A server as a process of its own."""

    def __init__(self, model: str, env: Mapping[str, str] | None = None, **settings: Any) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.fast.serving.runner", model, json.dumps({"model": "m", **settings})],
            cwd=ROOT,
            env=None if env is None else dict(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self.log: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(self.popen.stdout, self.lines.put), daemon=True),
            threading.Thread(target=self._read, args=(self.popen.stderr, self.log.append), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self.port = 0
        self.metrics_port = 0

    @staticmethod
    def _read(stream: Any, put: Callable[[str], None]) -> None:
        for line in stream:
            put(line.strip())

    def wait_ready(self) -> Process:
        word, port, metrics_port = self.line().split()
        assert word == "ready"
        self.port = int(port)
        self.metrics_port = 0 if metrics_port == "None" else int(metrics_port)
        return self

    def line(self) -> str:
        """The next line that it prints."""
        try:
            return self.lines.get(timeout=TIMEOUT_S)
        except queue.Empty:
            raise AssertionError("printed nothing:\n" + "\n".join(self.log)) from None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def metrics(self) -> str:
        """What Prometheus reads."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=TIMEOUT_S) as answer:
            text: str = answer.read().decode()
        return text

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Its exit code."""
        return self.popen.wait(timeout_s)

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(TIMEOUT_S)
        for reader in self._readers:
            reader.join(TIMEOUT_S)
        for stream in (self.popen.stdout, self.popen.stderr):
            assert stream is not None
            stream.close()


class Inside:
    """A server on an event loop in a thread of this process, so that a test can hold the model's strings."""

    def __init__(self, backends: Backend | list[Backend], **settings: Any) -> None:
        self.server = TeacherServer(ServerSettings(model="m", **settings), backends)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        try:
            self.port: int = self.call(self.server.start())
        except BaseException:
            self._end()
            raise

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def begin(self, coroutine: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, coroutine: Any) -> Any:
        return self.begin(coroutine).result(TIMEOUT_S)

    def begin_drain(self) -> Future[Any]:
        """Begin to drain; new requests are refused from here on."""
        draining = self.begin(self.server.drain(TIMEOUT_S))
        wait_until(lambda: self.server._lifecycle is not None and self.server._lifecycle.state is ServerState.DRAINING)
        return draining

    def metric(self, name: str, **labels: str) -> float:
        return self.server.metrics.registry.get_sample_value(name, {"model": "m", **labels}) or 0.0

    def close(self) -> None:
        self.call(self.server.stop())
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()


class StartProcess(Protocol):
    def __call__(
        self, model: str, *, env: Mapping[str, str] | None = None, ready: bool = True, **settings: Any
    ) -> Process: ...


class StartInside(Protocol):
    def __call__(self, backends: Backend | list[Backend], **settings: Any) -> Inside: ...


class Connect(Protocol):
    def __call__(self, target: str) -> Client: ...


@pytest.fixture
def process() -> Iterator[StartProcess]:
    """Starts servers as processes, and kills what is left of them."""
    started: list[Process] = []

    def start(model: str, *, env: Mapping[str, str] | None = None, ready: bool = True, **settings: Any) -> Process:
        one = Process(model, env, **settings)
        started.append(one)
        return one.wait_ready() if ready else one

    yield start
    for one in started:
        one.close()


@pytest.fixture
def inside() -> Iterator[StartInside]:
    """Starts servers in this process."""
    started: list[Inside] = []

    def start(backends: Backend | list[Backend], **settings: Any) -> Inside:
        started.append(Inside(backends, **settings))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Connects, and closes the channels in the end."""
    clients: list[Client] = []

    def one(target: str) -> Client:
        clients.append(Client(target))
        return clients[-1]

    yield one
    for client in clients:
        client.close()


@pytest.fixture
def unused_port() -> int:
    """A TCP port that nobody listened on a moment ago, and that no outgoing connection gets."""
    return free_ports(1)[0]
