"""Teacher servers for tests, on an event loop in a thread of the test's own process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing
from typing import Any

import pytest

from edl.protocol import codec, kserve, names, tensors
from edl.protocol.transport import grpc
from edl_serving import Array, Backend, ServerSettings, TeacherServer
from edl_serving.admission import ServerState
from tests.waiting import DEADLINE_S, wait_until

TIMEOUT_S = DEADLINE_S
"""For a call, and for what the event loop is asked to do: only a test that hangs comes to it."""


OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # else two clients of one server share a connection
]


class Client:
    """The methods of a server over a plain channel; bytes in, bytes out."""

    def __init__(self, target: str) -> None:
        self.channel = grpc.insecure_channel(target, options=OPTIONS)
        self.opened: list[Any] = []  # closed with it
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
        for each in self.opened:
            each.close()


def request_bytes(arrays: Mapping[str, Array], **parameters: int | float | str) -> bytes:
    header = kserve.ModelInferRequest(model_name="m")
    for name, array in arrays.items():
        header.inputs.add(name=name, datatype=tensors.datatype_of(array.dtype), shape=array.shape)
    for name, value in parameters.items():
        field = {int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        header.parameters[name].CopyFrom(kserve.InferParameter(**{field: value}))
    return codec.REQUEST.join(header.SerializeToString(), [tensors.to_raw(array) for array in arrays.values()])


def outputs_of(answer: bytes) -> dict[str, Array]:
    data, raw = codec.RESPONSE.split(answer)
    header = codec.RESPONSE.parse(data)
    return {
        output.name: tensors.from_raw(output.datatype, output.shape, data)
        for output, data in zip(header.outputs, raw, strict=True)
    }


class Inside:
    """A server on an event loop in a thread of this process, so that a test can hold the model's strings.

    Args:
        backends: of the server.
        wait: False to return while the server starts; `starting` is its start.
        settings: of the server.
    """

    def __init__(self, backends: Backend | list[Backend], *, wait: bool = True, **settings: Any) -> None:
        self.server = TeacherServer(ServerSettings(model="m", **settings), backends)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.starting = self.begin(self.server.start())
        if wait:
            try:
                self.starting.result(TIMEOUT_S)
            except BaseException:
                self._end()
                raise

    @property
    def port(self) -> int:
        return self.server.port

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
        wait_until(lambda: self.server._lifecycle.state is ServerState.DRAINING)
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


StartInside = Callable[..., Inside]
Connect = Callable[[str], Client]


@pytest.fixture
def inside(stack: ExitStack) -> StartInside:
    """Starts servers in this process."""
    return lambda backends, **settings: stack.enter_context(closing(Inside(backends, **settings)))


@pytest.fixture
def connect(stack: ExitStack) -> Connect:
    """Connects, and closes the channels in the end."""
    return lambda target: stack.enter_context(closing(Client(target)))
