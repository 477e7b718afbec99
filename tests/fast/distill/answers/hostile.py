"""A KServe v2 server that says what no server should: for students, which must bear it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from typing_extensions import Self

from edl.protocol import kserve, names
from edl.protocol.transport import grpc

NASTY = "ok\r\n12:00 ERROR all lost\x1b[2J\x1b]0;title\x07\u202egnp.exe\u2028"


@dataclass
class HostileServer:
    """A teacher of model `m`, x:FP32[4] -> y:FP32[4], which refuses each request.

    Attributes:
        details, code, hint: of the refusal; the hint goes as the trailing metadata, or beside a stream's status.
        streams: whether it announces EDL's stream.
        version, output: in its model's metadata.
        asked: how many requests came.
    """

    details: str = "full"
    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    hint: Any = None
    streams: bool = False
    version: str = "1"
    output: str = "y"
    asked: int = 0
    endpoint: str = ""
    _ready: Future[None] = field(default_factory=Future)

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)
        self._thread.start()
        self._ready.result(30)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(30)
        self._loop.close()

    async def _serve(self) -> None:
        self._ended = asyncio.Event()
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(names.SERVICE, self._handlers()),))
        self.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._ready.set_result(None)
        await self._ended.wait()
        await server.stop(0)

    def _handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        tensor = kserve.ModelMetadataResponse.TensorMetadata
        extensions: Sequence[str] = [names.EXTENSION_STREAM] if self.streams else []
        answers = {
            "ServerReady": kserve.ServerReadyResponse(ready=True),
            "ServerMetadata": kserve.ServerMetadataResponse(extensions=extensions),
            "ModelReady": kserve.ModelReadyResponse(ready=True),
            "ModelMetadata": kserve.ModelMetadataResponse(
                name="m",
                versions=[self.version],
                inputs=[tensor(name="x", datatype="FP32", shape=[-1, 4])],
                outputs=[tensor(name=self.output, datatype="FP32", shape=[-1, 4])],
            ),
            "RepositoryIndex": kserve.RepositoryIndexResponse(
                models=[kserve.RepositoryIndexResponse.ModelIndex(name="m", state="READY")]
            ),
        }

        def fixed(answer: Any) -> grpc.RpcMethodHandler:
            async def handle(_: bytes, __: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
                return bytes(answer.SerializeToString())

            return grpc.unary_unary_rpc_method_handler(handle)

        handlers = {method: fixed(answer) for method, answer in answers.items()}
        handlers["ModelInfer"] = grpc.unary_unary_rpc_method_handler(self._infer)
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream)
        return handlers

    async def _infer(self, _: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        self.asked += 1
        trailing = () if self.hint is None else ((names.RETRY_AFTER_MS, str(self.hint)),)
        await context.abort(self.code, self.details, trailing)
        raise AssertionError("unreachable")

    async def _stream(self, requests: Any, _: grpc.aio.ServicerContext[bytes, bytes]) -> Any:
        async for data in requests:
            request = kserve.ModelInferRequest.FromString(data)
            if names.CANCEL in request.parameters:
                continue
            self.asked += 1
            answer = kserve.ModelStreamInferResponse(error_message=self.details)
            answer.infer_response.id = request.id
            parameters = answer.infer_response.parameters
            parameters[names.STATUS].string_param = self.code.name
            if isinstance(self.hint, int):
                parameters[names.RETRY_AFTER].int64_param = self.hint
            elif self.hint is not None:
                parameters[names.RETRY_AFTER].string_param = self.hint
            yield answer.SerializeToString()
