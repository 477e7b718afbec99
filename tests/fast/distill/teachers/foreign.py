"""A KServe v2 server that is not ours, and says what it is told to: for students, which must bear it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from typing_extensions import Self

from edl.protocol import codec, kserve, names, tensors
from edl.protocol.transport import grpc


@dataclass
class ForeignServer:
    """A teacher of x:FP32[4] -> y:FP32[4], in threads of this process.

    Attributes:
        model, versions, output, x, y: as its model's metadata say; `x` and `y` are shapes.
        scale: of this model, what the answer is the input times.
        named: the version that the next answer names, from the version that its request names.
        change: changes an answer before it is sent.
        rewrite: by method, what becomes of an answer's bytes before they are sent.
        others: Names of other models that it has.
        left_out: methods that it does not implement.
        refused: by method, the status that it answers with.
        asked, rows: the versions that requests named, and how many rows they had.
    """

    model: str = "m"
    versions: Sequence[str] = ("1",)
    output: str = "y"
    x: Sequence[int] = (-1, 4)
    y: Sequence[int] = (-1, 4)
    scale: float = 1.0
    named: Callable[[str], str] = lambda asked: "1"
    change: Callable[[kserve.ModelInferResponse, list[bytes]], None] = lambda header, raw: None
    rewrite: dict[str, Callable[[bytes], bytes]] = field(default_factory=dict)
    extensions: Sequence[str] = ()
    others: Sequence[str] = ()
    left_out: Sequence[str] = ()
    refused: dict[str, tuple[grpc.StatusCode, str]] = field(default_factory=dict)
    compression: grpc.Compression = grpc.Compression.NoCompression
    port: int = 0
    asked: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def __enter__(self) -> Self:
        tensor = kserve.ModelMetadataResponse.TensorMetadata
        of_index = kserve.RepositoryIndexResponse.ModelIndex
        index = [of_index(name=name, state="READY") for name in (self.model, *self.others)]
        config = kserve.ModelConfig(name=self.model, max_batch_size=8)
        config.parameters[names.MAX_ROWS].string_value = "8"
        fixed: dict[str, Any] = {
            "ServerReady": kserve.ServerReadyResponse(ready=True),
            "ServerMetadata": kserve.ServerMetadataResponse(extensions=[*self.extensions, "model_configuration"]),
            "ModelMetadata": kserve.ModelMetadataResponse(
                name=self.model,
                versions=self.versions,
                inputs=[tensor(name="x", datatype="FP32", shape=self.x)],
                outputs=[tensor(name=self.output, datatype="FP32", shape=self.y)],
            ),
            "ModelConfig": kserve.ModelConfigResponse(config=config),
            "RepositoryIndex": kserve.RepositoryIndexResponse(models=index),
        }
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(
                lambda _, context, name=name, answer=answer: self._rewritten(name, answer.SerializeToString(), context)
            )
            for name, answer in fixed.items()
            if name not in self.left_out
        }
        handlers["ModelReady"] = grpc.unary_unary_rpc_method_handler(self._model_ready)
        handlers["ModelInfer"] = grpc.unary_unary_rpc_method_handler(self._infer)
        options = [("grpc.max_send_message_length", -1)]
        self._server = grpc.server(ThreadPoolExecutor(8), options=options, compression=self.compression)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(names.SERVICE, handlers),))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()
        return self

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.stop(0).wait()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _infer(self, data: bytes, context: Any) -> bytes:
        return self._rewritten("ModelInfer", self._answer(data), context)

    def _answer(self, data: bytes) -> bytes:
        header, raw = codec.REQUEST.split(data)
        request = codec.REQUEST.parse(header)
        self.asked.append(request.model_version)
        x = np.frombuffer(raw[0], "<f4").reshape(-1, 4)
        self.rows.append(len(x))
        answer = kserve.ModelInferResponse(model_name=self.model, model_version=self.named(request.model_version))
        answer.id = request.id
        answer.outputs.add(name=self.output, datatype="FP32", shape=x.shape)
        contents = [bytes(tensors.to_raw(x * np.float32(self.scale)))]
        self.change(answer, contents)
        return codec.RESPONSE.join(answer.SerializeToString(), contents)

    def _model_ready(self, data: bytes, context: Any) -> bytes:
        """As Triton: of a model that it does not have, it says that it is not ready."""
        ready = kserve.ModelReadyRequest.FromString(data).name == self.model
        return self._rewritten("ModelReady", kserve.ModelReadyResponse(ready=ready).SerializeToString(), context)

    def _rewritten(self, method: str, data: bytes, context: Any = None) -> bytes:
        if method in self.refused:
            context.abort(*self.refused[method])
        return self.rewrite[method](data) if method in self.rewrite else data
