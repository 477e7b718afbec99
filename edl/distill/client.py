"""One teacher's connection: KServe v2 over gRPC, shared memory on the same host.

Whatever goes wrong leaves here as `RequestFailed` with a `Failure` that the dispatcher understands.
What does not belong here: retries, or any choice between teachers.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from edl.distill.actions import Failure, FailureKind
from edl.distill.arena import Region
from edl.distill.compress import TopK, to_float16, top_k
from edl.distill.failure import RequestFailed, failure_of
from edl.distill.request import Ask, ModelSpec, Outputs, Payload, TensorSpec, request_header
from edl.distill.stream import Answer, InferStream
from edl.errors import ProtocolError, SettingsError
from edl.protocol import codec, kserve, names, tensors
from edl.protocol.tensors import Array
from edl.protocol.transport import grpc

__all__ = ["RequestFailed", "TeacherClient"]

logger = logging.getLogger("edl.distill")

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # readers do not share, and so do not break, each other's connections
    ("grpc.enable_retries", 0),  # the dispatcher decides that
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # of gRPC's own pings, which keepalive waits behind: by default a minute
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
]

_NO_ID = codec.id_field("-" * 8)  # as long as a stream's, so that a call of its own is as large
_MOST_SPECS = 64
_CONFIGURATION = "model_configuration"  # Triton's extension
_SMALL = 4096  # bytes; no server refuses a message for that


class TeacherClient:
    """A connection to one teacher. All methods run on the event loop of the reader."""

    def __init__(self, endpoint: str, ask: Ask, *, shared_memory: bool = True) -> None:
        self.endpoint = endpoint
        self.ask = ask
        self.spec = ModelSpec("", "", {}, {})
        self.shares_memory = shared_memory and _is_local(endpoint)
        self._channel = grpc.aio.insecure_channel(endpoint, options=_OPTIONS)
        self._infer: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(
            names.method("ModelInfer")
        )
        self._regions: set[str] = set()
        self._registering = asyncio.Lock()
        self._headers: dict[Any, bytes] = {}
        self._specs: dict[bytes, list[tuple[str, str, tuple[int, ...]]]] = {}
        self._server_top_k = False
        self._server_checks_nan = False
        self._server_streams = False
        self._server_bundles = False
        self._stream: InferStream | None = None
        self._proven_nbytes = _SMALL
        self._max_batch = 0

    @property
    def takes_bundles(self) -> bool:
        """Whether requests name shared memory, and several of them can go in one message."""
        return self.shares_memory and self._server_streams and self._server_bundles

    async def open(self, timeout_s: float) -> ModelSpec:
        """Connect, and see that the server is ready and what its model looks like.

        Raises:
            RequestFailed: LOST if it cannot be reached or is not ready, REJECTED if it has no such model.
        """
        deadline = time.monotonic() + timeout_s
        ready = await self._ask("ServerReady", kserve.ServerReadyRequest(), deadline)
        if not ready.ready:
            raise RequestFailed(FailureKind.LOST, f"{self.endpoint} is not ready")
        server = await self._ask("ServerMetadata", kserve.ServerMetadataRequest(), deadline)
        model = self.ask.model or await self._only_model(deadline)
        model_ready = await self._ask("ModelReady", kserve.ModelReadyRequest(name=model), deadline)
        if not model_ready.ready:
            raise RequestFailed(FailureKind.LOST, f"model {model!r} of {self.endpoint} is not ready")
        self.shares_memory = self.shares_memory and names.EXTENSION_SHARED_MEMORY in server.extensions
        self._server_top_k = names.EXTENSION_TOP_K in server.extensions
        self._server_streams = names.EXTENSION_STREAM in server.extensions
        self._server_bundles = names.EXTENSION_BUNDLE in server.extensions
        self._server_checks_nan = names.EXTENSION_NO_NAN in server.extensions
        self._max_batch = await self._max_rows(model, deadline) if _CONFIGURATION in server.extensions else 0
        self.spec = await self._spec(model, deadline)
        return self.spec

    async def look(self, timeout_s: float) -> ModelSpec:
        """What the model looks like by now.

        Raises:
            RequestFailed: as `open`.
        """
        return await self._spec(self.spec.name, time.monotonic() + timeout_s)

    def start(
        self, payload: Payload, timeout_s: float, done: Callable[[Outputs | Failure | None], None]
    ) -> Callable[[], None] | None:
        """Ask for the outputs of `payload` over the stream, without a task for it.

        Args:
            done: called once, not before this returns, with what `infer` returns or why not; with None if cancelled.

        Returns:
            What cancels the request. None, and nothing done, if the stream cannot take it: then `infer` can.
        """
        slot = payload.slot if self.shares_memory else None
        if not self._server_streams or self._lost or (slot is not None and slot.region.name not in self._regions):
            return None
        header = self._header(payload, timeout_s, in_slot=slot is not None)
        raw = payload.raw if slot is None else ()
        if not self._proven(header, raw):
            return None
        stream = self._open_stream()
        number = stream.start(header, raw, timeout_s, functools.partial(self._hand_over, payload.rows, done))
        return functools.partial(stream.cancel, number)

    def _hand_over(
        self, rows: int, done: Callable[[Outputs | Failure | None], None], answer: Answer | Failure | None
    ) -> None:
        if isinstance(answer, tuple):
            try:
                outputs = self._outputs(answer, rows)
            except RequestFailed as exc:
                answer = exc.failure
            except Exception as exc:
                # Whatever it was, the request has ended; it must not take the stream, and itself, along.
                logger.exception("an answer of %s was not understood, in a way not foreseen", self.endpoint)
                answer = Failure(FailureKind.ERROR, f"{self.endpoint}: {type(exc).__name__}: {exc}")
            else:
                done(outputs)
                return
        done(answer)

    async def infer(self, payload: Payload, timeout_s: float) -> Outputs:
        """Ask for the outputs of `payload`.

        Returns:
            Arrays [rows, ...], read-only, or `TopK` where `ask.top_k` is set.

        Raises:
            RequestFailed: there is no usable answer.
        """
        if self._lost:
            raise RequestFailed(FailureKind.LOST, f"{self.endpoint}: the connection was lost while nobody asked")
        deadline = time.monotonic() + timeout_s
        in_slot = self.shares_memory and payload.slot is not None
        if in_slot and payload.slot is not None:
            in_slot = await self._registered(payload.slot.region, deadline)
        header = self._header(payload, timeout_s, in_slot=in_slot)
        raw = () if in_slot else payload.raw
        timeout_s = max(deadline - time.monotonic(), 0.001)
        if self._server_streams and self._proven(header, raw):
            answer = await self._open_stream().ask(header, raw, timeout_s)
        else:
            answer = await self._call(header, raw, timeout_s)
        return self._outputs(answer, payload.rows)

    async def close(self) -> None:
        """Close the connection; requests under way end with LOST."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()
        await self._channel.close()

    async def _spec(self, model: str, deadline: float) -> ModelSpec:
        meta = await self._ask("ModelMetadata", kserve.ModelMetadataRequest(name=model), deadline)
        return ModelSpec(
            name=model,
            version=meta.versions[-1] if meta.versions else "",
            inputs={tensor.name: _spec_of(tensor) for tensor in meta.inputs},
            outputs={tensor.name: _spec_of(tensor) for tensor in meta.outputs},
            max_rows=self._max_batch,
        )

    # Requests

    @property
    def _lost(self) -> bool:
        """Whether the stream has ended: who answers at this address now may be another, and know no region of ours."""
        return self._stream is not None and self._stream.broken

    def _open_stream(self) -> InferStream:
        if self._stream is None:
            self._stream = InferStream(self._channel, self.endpoint, in_bundles=self._server_bundles)
        return self._stream

    def _proven(self, header: bytes, raw: Sequence[codec.Buffer]) -> bool:
        """Whether the server takes messages of this size. One that it does not take would end the whole stream."""
        return _nbytes(header, raw) <= self._proven_nbytes

    async def _call(self, header: bytes, raw: Sequence[codec.Buffer], timeout_s: float) -> Answer:
        try:
            answer = await self._infer(codec.join_request(header + _NO_ID, raw), timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise _translated(exc, self.endpoint) from exc
        self._proven_nbytes = max(self._proven_nbytes, _nbytes(header, raw))
        try:
            return codec.split_response(answer)
        except ProtocolError as exc:
            raise RequestFailed(FailureKind.BAD_OUTPUT, f"{self.endpoint}: {exc}") from exc

    def _header(self, payload: Payload, timeout_s: float, *, in_slot: bool) -> bytes:
        slot = payload.slot if in_slot else None
        key: Any = (payload.inputs, timeout_s)
        if slot is not None:
            key = (payload.inputs, timeout_s, slot.region.name, slot.offset)
        header = self._headers.get(key)
        if header is None:
            if len(self._headers) > 1024:
                self._headers.clear()
            header = request_header(self.ask, self.spec.name, payload, compressed=self._server_top_k, in_slot=in_slot)
            if self._server_streams:
                header += _timeout_field(timeout_s)
            self._headers[key] = header
        return header

    async def _registered(self, region: Region, deadline: float) -> bool:
        """Tell the server of a region, once. If it cannot have it (another container, say), use gRPC from now on."""
        async with self._registering:
            if region.name in self._regions or not self.shares_memory:
                return self.shares_memory
            request = kserve.SystemSharedMemoryRegisterRequest(
                name=region.name, key=region.key, offset=0, byte_size=region.nbytes
            )
            try:
                await self._ask("SystemSharedMemoryRegister", request, deadline)
            except RequestFailed as exc:
                if exc.failure.kind is FailureKind.LOST:
                    raise
                logger.info("%s does not take shared memory: %s", self.endpoint, exc)
                self.shares_memory = False
            else:
                self._regions.add(region.name)
            return self.shares_memory

    async def _only_model(self, deadline: float) -> str:
        index = await self._ask("RepositoryIndex", kserve.RepositoryIndexRequest(ready=True), deadline)
        found = sorted({model.name for model in index.models})
        if len(found) != 1:
            has = f"serves {', '.join(found)}" if found else "serves no model"
            raise RequestFailed(FailureKind.REJECTED, f"{self.endpoint} {has}: say which one with model=")
        return str(found[0])

    async def _max_rows(self, model: str, deadline: float) -> int:
        """Rows of one request that the server takes, 0 if it does not say."""
        try:
            config = (await self._ask("ModelConfig", kserve.ModelConfigRequest(name=model), deadline)).config
        except RequestFailed as exc:
            if exc.failure.kind is FailureKind.LOST:
                raise
            logger.info("%s does not tell the configuration of model %r: %s", self.endpoint, model, exc)
            return 0
        if not self._server_streams:
            return max(int(config.max_batch_size), 0)
        said = config.parameters[names.MAX_ROWS].string_value
        return int(said) if said.isdecimal() else 0

    async def _ask(self, method: str, request: Any, deadline: float) -> Any:
        answer_type = getattr(kserve, f"{method}Response")
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(names.method(method))
        timeout_s = deadline - time.monotonic()
        try:
            return answer_type.FromString(await call(request.SerializeToString(), timeout=max(timeout_s, 0.001)))
        except grpc.aio.AioRpcError as exc:
            # An exception kept in a local variable would be a cycle that keeps the channel's thread alive.
            if exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise RequestFailed(FailureKind.LOST, f"{self.endpoint} does not answer {method}") from exc
            raise _translated(exc, self.endpoint) from exc
        except DecodeError as exc:
            what = f"{self.endpoint}: its answer to {method} is no message of KServe v2"
            raise RequestFailed(FailureKind.REJECTED, what) from exc

    # Answers

    def _outputs(self, answer: Answer, rows: int) -> Outputs:
        try:
            arrays = self._arrays(*answer)
            return {name: self._output(name, arrays, rows) for name in self.ask.outputs}
        except (ProtocolError, SettingsError) as exc:  # SettingsError: arrays that are no top-k labels
            raise RequestFailed(FailureKind.BAD_OUTPUT, f"{self.endpoint}: {exc}") from exc

    def _arrays(self, header: bytes, raw: list[memoryview]) -> dict[str, Array]:
        specs = self._specs.get(header)
        if specs is None:
            message = codec.parse_response(header)
            self._check_version(message.model_version)
            if not raw:
                return {
                    tensor.name: tensors.from_contents(tensor.datatype, tensor.shape, tensor.contents)
                    for tensor in message.outputs
                }
            specs = [(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in message.outputs]
            if len(self._specs) >= _MOST_SPECS or len(header) > _SMALL:
                self._specs.clear()
            self._specs[header] = specs  # answers to requests of one shape have one header
        if len(raw) != len(specs):
            raise ProtocolError(f"{len(specs)} outputs with {len(raw)} raw contents")
        return {
            name: tensors.from_raw(datatype, shape, data)
            for (name, datatype, shape), data in zip(specs, raw, strict=True)
        }

    def _check_version(self, version: str) -> None:
        """gRPC connects again by itself, perhaps to a server that took the address of the one before.

        Only our own servers say the same version here as in their metadata.
        """
        if self._server_streams and version != self.spec.version:
            what = f"{self.endpoint} has version {version!r} of its model now, and had {self.spec.version!r}"
            raise RequestFailed(FailureKind.LOST, what)

    def _output(self, name: str, found: dict[str, Array], rows: int) -> Array | TopK:
        if self.ask.top_k is None:
            return self._checked(name, found, rows)
        ids_name, values_name, tail_name = names.top_k_names(name)
        if ids_name not in found:  # the server knows nothing of top-k: do it here
            whole = self._checked(name, found, rows)
            return top_k(whole, min(self.ask.top_k, whole.shape[-1]), self.ask.temperature)
        width = self.spec.outputs[name].shape[-1] if name in self.spec.outputs else -1
        return TopK(
            ids=self._checked(ids_name, found, rows),
            values=self._checked(values_name, found, rows),
            tail_lse=self._checked(tail_name, found, rows),
            temperature=self.ask.temperature,
            classes=width if width > 0 else None,
        )

    def _checked(self, name: str, found: dict[str, Array], rows: int) -> Array:
        array = found.get(name)
        if array is None:
            has = ", ".join(found) or "none"
            raise self._unusable(f"no output {name!r}, only {has}")
        if array.ndim == 0 or array.shape[0] != rows:
            raise self._unusable(f"output {name!r} has shape {list(array.shape)} for {rows} rows")
        spec = self.spec.outputs.get(name)
        if spec is not None and not spec.fits(array.shape[1:]):
            raise self._unusable(f"output {name!r} has rows of shape {list(array.shape[1:])}, not {list(spec.shape)}")
        if array.dtype.kind == "f":
            # `min` hands NaN on, and is done in half the time of a look at each.
            if not self._server_checks_nan and array.size and np.isnan(array.min()):
                row = int(np.argwhere(np.isnan(array))[0][0])
                raise self._unusable(f"output {name!r} is NaN in row {row} of {rows}")
            if self.ask.dtype is not None and array.dtype != self.ask.dtype:
                array = to_float16(array) if self.ask.dtype == "float16" else array.astype(self.ask.dtype)
        return array

    def _unusable(self, what: str) -> RequestFailed:
        return RequestFailed(FailureKind.BAD_OUTPUT, f"{self.endpoint} (model {self.spec.name!r}): {what}")


def _is_local(endpoint: str) -> bool:
    host = endpoint.rpartition(":")[0].strip("[]")
    return endpoint.startswith("unix:") or host in ("localhost", "::1") or host.startswith("127.")


def _nbytes(header: bytes, raw: Sequence[codec.Buffer]) -> int:
    return len(header) + sum([memoryview(part).nbytes for part in raw])


def _timeout_field(timeout_s: float) -> bytes:
    """Protobuf messages add up when their bytes are joined."""
    message = kserve.ModelInferRequest()
    message.parameters[names.TIMEOUT_MS].int64_param = round(timeout_s * 1000)
    return bytes(message.SerializeToString())


def _spec_of(tensor: Any) -> TensorSpec:
    return TensorSpec(tensor.name, tensor.datatype, tuple(tensor.shape)[1:])


def _translated(exc: grpc.aio.AioRpcError, endpoint: str) -> RequestFailed:
    hint = dict(exc.trailing_metadata() or ()).get(names.RETRY_AFTER_MS)
    return failure_of(exc.code(), exc.details() or "", hint, endpoint)
