"""KServe v2's methods as gRPC handlers that take and return bytes.

gRPC is given no (de)serializers. Instead, `edl.protocol.codec` splits inference requests without copying tensors. A
message that cannot be parsed is answered with INVALID_ARGUMENT, not with gRPC's own INTERNAL.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from google.protobuf.message import DecodeError, Message

from edl import __version__
from edl.errors import ProtocolError
from edl.protocol import codec, kserve, names
from edl.protocol.tls import CredentialFiles
from edl.protocol.transport import grpc
from edl.quoting import clip, quote
from edl_serving.admission import ClientConnection, ConnectionLimiter, Lifecycle, ServicerContext, client_of
from edl_serving.batching.batch_queue import InferenceJob
from edl_serving.batching.batcher import Batcher
from edl_serving.channel import ChannelListener
from edl_serving.model import ServedModel
from edl_serving.monitoring import AccessLog, Metrics
from edl_serving.request import Join, RequestDecoder
from edl_serving.request_error import RequestError, invalid_argument, malformed_message
from edl_serving.request_plan import request_id_of, valid_traceparent
from edl_serving.settings import ServerSettings
from edl_serving.shared_memory import ClientRegions, RegionTable

_log = logging.getLogger(__name__)


Answer: TypeAlias = Callable[[Any, ServicerContext], Message]
_ONE_MODEL = "this server has one model: start another server with edl serve, and end a server with SIGTERM"
_SYSTEM_MEMORY = "this server takes system shared memory only: SystemSharedMemoryRegister"
_ELSEWHERE = {
    "RepositoryModelLoad": _ONE_MODEL,
    "RepositoryModelUnload": _ONE_MODEL,
    "CudaSharedMemoryStatus": _SYSTEM_MEMORY,
    "CudaSharedMemoryRegister": _SYSTEM_MEMORY,
    "CudaSharedMemoryUnregister": _SYSTEM_MEMORY,
    "TraceSetting": "this server creates no traces: send traceparent, and read it in edl serve --access-log",
    "LogSettings": "the server's logging is set when it starts: edl serve --verbose and --log-format",
}
"""The methods of Triton that this server does not implement, each with what to use instead."""


class InferenceServicer:
    """Answers KServe v2's methods, and opens tensor channels; None turns a feature off."""

    def __init__(
        self,
        settings: ServerSettings,
        model: ServedModel,
        lifecycle: Lifecycle,
        batcher: Batcher,
        regions: RegionTable | None,
        clients: ConnectionLimiter,
        metrics: Metrics,
        access: AccessLog | None,
        files: CredentialFiles | None,
    ) -> None:
        self.model = model
        self.lifecycle = lifecycle
        self.metrics = metrics
        self._decoder = RequestDecoder(model, settings.max_queue_rows)
        self._batcher = batcher
        self.regions = regions
        self.clients = clients
        self._access = access
        self._streams: set[InferStream] = set()
        self.channels = ChannelListener(self, files, settings.max_connection_age_s)

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        answers: dict[str, Answer] = {
            "ServerLive": lambda request, context: kserve.ServerLiveResponse(live=True),
            "ServerReady": lambda request, context: kserve.ServerReadyResponse(ready=self.lifecycle.ready),
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            "SystemSharedMemoryStatus": lambda request, context: self._local_regions(context).status(request.name),
            "SystemSharedMemoryRegister": self._shm_register,
            "SystemSharedMemoryUnregister": self._shm_unregister,
        }
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "ModelInfer": grpc.unary_unary_rpc_method_handler(self.infer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self.stream_infer),
        }
        handlers |= {name: _unary(getattr(kserve, f"{name}Request"), answer) for name, answer in answers.items()}
        handlers |= {name: _refusing(f"no method {name}: {instead}") for name, instead in _ELSEWHERE.items()}
        service, method = names.OPEN_CHANNEL.strip("/").split("/")
        opening: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            method: grpc.unary_unary_rpc_method_handler(self.open_channel)
        }
        return (
            grpc.method_handlers_generic_handler(names.SERVICE, handlers),
            grpc.method_handlers_generic_handler(service, opening),
        )

    def _model_ready(self, request: kserve.ModelReadyRequest, context: ServicerContext) -> Message:
        known = request.name == self.model.name and request.version in ("", self.model.version)
        return kserve.ModelReadyResponse(ready=known and self.lifecycle.ready)

    def _server_metadata(self, request: kserve.ServerMetadataRequest, context: ServicerContext) -> Message:
        return kserve.ServerMetadataResponse(name="edl", version=__version__, extensions=self.model.extensions())

    def _model_metadata(self, request: kserve.ModelMetadataRequest, context: ServicerContext) -> Message:
        self._check_room(context)
        self.model.check_request(request.name, request.version)
        return self.model.metadata()

    def _model_config(self, request: kserve.ModelConfigRequest, context: ServicerContext) -> Message:
        self.model.check_request(request.name, request.version)
        return self.model.config()

    def _model_statistics(self, request: kserve.ModelStatisticsRequest, context: ServicerContext) -> Message:
        """Report the model's calls by number of rows. As in Triton, a request without a name is for all models."""
        self.model.check_request(request.name or self.model.name, request.version)
        batches = self.metrics.batches()
        answer = kserve.ModelStatisticsResponse()
        found = answer.model_stats.add(
            name=self.model.name,
            version=self.model.version,
            inference_count=sum(rows * count for rows, (count, _) in batches.items()),
            execution_count=sum(count for count, _ in batches.values()),
        )
        for rows, (count, compute_s) in sorted(batches.items()):
            spent = kserve.StatisticDuration(count=count, ns=round(compute_s * 1e9))
            found.batch_stats.add(batch_size=rows, compute_infer=spent)
        return answer

    def _repository_index(self, request: kserve.RepositoryIndexRequest, context: ServicerContext) -> Message:
        ready = self.lifecycle.ready
        answer = kserve.RepositoryIndexResponse()
        if ready or not request.ready:
            state, reason = ("READY", "") if ready else ("UNAVAILABLE", self.lifecycle.state.value)
            answer.models.add(name=self.model.name, version=self.model.version, state=state, reason=reason)
        return answer

    def _shm_register(self, request: kserve.SystemSharedMemoryRegisterRequest, context: ServicerContext) -> Message:
        self._local_regions(context).register(request)
        return kserve.SystemSharedMemoryRegisterResponse()

    def _shm_unregister(self, request: kserve.SystemSharedMemoryUnregisterRequest, context: ServicerContext) -> Message:
        self._local_regions(context).unregister(request.name)
        return kserve.SystemSharedMemoryUnregisterResponse()

    def _check_room(self, context: ServicerContext) -> None:
        """Refuse a student that would exceed the limits as soon as it connects, not only at its first request."""
        clients = self.clients
        try:
            clients.close_call(clients.open_call(client_of(context)))
        except RequestError as error:
            self.metrics.record_rejected_call(error)
            raise

    def _local_regions(self, context: ServicerContext) -> ClientRegions:
        table = self.regions
        if table is None:
            raise invalid_argument("shared memory is turned off on this server")
        regions = table.regions_of_client(context.peer())
        if regions is None:
            raise invalid_argument(f"shared memory is for clients on this host, not for {quote(context.peer())}")
        return regions

    async def infer(self, data: bytes, context: ServicerContext) -> bytes:
        answer = await self._answer_call(data, context)
        del data  # gRPC keeps the exception of `abort`, and with it this frame, until garbage is collected
        if isinstance(answer, RequestError):
            await context.abort(answer.code, answer.message, answer.trailing_metadata)
        return answer

    async def _answer_call(self, data: bytes, context: ServicerContext) -> bytes | RequestError:
        call, metadata = self._open_call(context)
        request_id, nbytes = request_id_of(metadata), len(data)

        def after_call(done: Callable[[], object]) -> None:
            context.add_done_callback(lambda _: done())  # type: ignore[arg-type]  # the stub's type is a class

        try:
            client = self.admit(call, nbytes, after_call)
            try:
                header, raw = codec.REQUEST.split(data)
            except ProtocolError as exc:
                raise malformed_message(data, str(exc)) from exc
        except RequestError as error:
            self.record_error(error, call, request_id, nbytes)
            return error.copy()
        try:
            left_s = context.time_remaining()
            answer = await self.answer(call, header, raw, nbytes, request_id, left_s, codec.RESPONSE.join)
        except asyncio.CancelledError:
            self.metrics.record_outcome("cancelled")
            raise
        if isinstance(answer, bytes):
            sent_nbytes = len(answer)
            client.nbytes += sent_nbytes
            after_call(lambda: client.release_bytes(sent_nbytes))
        return answer

    def admit(self, call: Call, nbytes: int, after_call: Callable[[Callable[[], object]], object]) -> ClientConnection:
        """Count a call with one request, and the request's bytes; raise RequestError if there is no room for it.

        `after_call` is passed a function that undoes each count. It must call this function when the call ends, even if
        `admit` raises.
        """
        self.lifecycle.begin_request()
        after_call(self.lifecycle.end_request)
        client = self.clients.open_call(call.client)
        after_call(lambda: self.clients.close_call(client))
        client.hold_bytes(nbytes)
        after_call(lambda: client.release_bytes(nbytes))
        return client

    async def answer(
        self,
        call: Call,
        header: bytes,
        raw: list[memoryview],
        nbytes: int,
        request_id: str,
        left_s: float | None,
        join: Join,
    ) -> bytes | RequestError:
        """Compute a request from a call, stream or channel; return the response or the error.

        `left_s` is the number of seconds for which the client still waits; None if only a parameter of the request can
        say that. See `encode_response` for `join`.
        """
        job = None
        try:
            request = await self._decoder.decode(header, raw, call.regions)
            request_id = request_id or request.plan.id
            limits = (request.plan.timeout_s, left_s)
            timeout_s = min((limit for limit in limits if limit is not None), default=None)
            job = InferenceJob.of(request, timeout_s, call.client, nbytes, request_id, join)
            answer = await self._batcher.compute(job)
        except RequestError as error:
            self.record_error(error, call, request_id, nbytes, job)
            return error.copy()
        except asyncio.CancelledError:
            self._log_access("CANCELLED", call, request_id, nbytes, job)
            raise
        self.metrics.record_outcome("ok")
        self._log_access("OK", call, request_id, nbytes, job)
        return answer

    async def stream_infer(self, requests: AsyncIterator[bytes], context: ServicerContext) -> None:
        call, _ = self._open_call(context)
        try:
            client = self.clients.open_call(call.client, stream=True)
        except RequestError as exc:
            self.metrics.record_rejected_call(exc)
            await context.abort(exc.code, exc.message, exc.trailing_metadata)
        stream = InferStream(self, call, context, client)
        self._streams.add(stream)
        try:
            await stream.run(requests)
        finally:
            self._streams.discard(stream)
            self.clients.close_call(client, stream=True)

    async def open_channel(self, data: bytes, context: ServicerContext) -> bytes:
        call, _ = self._open_call(context)
        try:
            return self.channels.offer(call)
        except RequestError as exc:
            self.metrics.record_rejected_call(exc)
            await context.abort(exc.code, exc.message, exc.trailing_metadata)

    def end_streams(self) -> None:
        """End all open streams and channels once their pending responses are sent."""
        for stream in self._streams:
            stream.end()
        self.channels.end_channels()

    def record_error(
        self, error: RequestError, call: Call, request_id: str, nbytes: int, job: InferenceJob | None = None
    ) -> None:
        self.metrics.record_error(error)
        code = error.code.name
        _log.debug("request %s of %s: %s: %s", quote(request_id), call.client, code, quote(error.message))
        self._log_access(code, call, request_id, nbytes, job)

    def _log_access(self, status: str, call: Call, request_id: str, nbytes: int, job: InferenceJob | None) -> None:
        if self._access is not None:
            sent = job.request.plan.traceparent if job is not None else ""
            fields = {"client": call.client, "id": clip(request_id, 128), "traceparent": sent or call.traceparent}
            timing = job.timing() if job is not None else {}
            self._access.write_request(**fields, bytes=nbytes, status=status, **timing)

    def _open_call(self, context: ServicerContext) -> tuple[Call, Mapping[str, str | bytes]]:
        metadata = dict(context.invocation_metadata() or ())
        regions = self.regions.regions_of_client(context.peer()) if self.regions is not None else None
        traceparent = valid_traceparent(metadata.get(names.TRACEPARENT))
        return Call(client_of(context), traceparent, regions), metadata


class Call(NamedTuple):
    """A call, stream or channel: its client, its span (empty for none), and the shared memory it may use."""

    client: str
    traceparent: str
    regions: ClientRegions | None


_WINDOW = 64  # requests of one stream that are processed at a time; the others wait in the connection


@dataclass(eq=False)
class _Accepted:
    """A request from a stream; its answer has not been written yet."""

    task: asyncio.Task[bytes] = field(init=False)
    counted: ExitStack = field(default_factory=ExitStack)  # undoes what is counted for it


class InferStream:
    """Answers the requests on a stream in order, as Triton does. An error ends only its own request, not the stream."""

    def __init__(
        self, handler: InferenceServicer, call: Call, context: ServicerContext, client: ClientConnection
    ) -> None:
        self._handler = handler
        self._call = call
        self._context = context
        self._client = client
        self._window = asyncio.Semaphore(_WINDOW)
        self._answers: asyncio.Queue[_Accepted | None] = asyncio.Queue()
        self._accepted: set[_Accepted] = set()
        self._receiver: asyncio.Task[None] | None = None

    async def run(self, requests: AsyncIterator[bytes]) -> None:
        self._receiver = asyncio.create_task(self._receive(requests))
        try:
            while (accepted := await self._answers.get()) is not None:
                await self._context.write(await accepted.task)
                self._release(accepted)
            if self._receiver.done() and not self._receiver.cancelled():
                self._receiver.result()
        finally:
            self._receiver.cancel()
            left = list(self._accepted)
            for accepted in left:
                accepted.task.cancel()
            await asyncio.gather(self._receiver, *[accepted.task for accepted in left], return_exceptions=True)
            for accepted in left:
                if accepted.task.cancelled():  # counted here, since a request that is cancelled at once never runs
                    self._handler.metrics.record_outcome("cancelled")
                self._release(accepted)

    def end(self) -> None:
        """Stop accepting requests, and end the stream after the last response."""
        if self._receiver is not None:
            self._receiver.cancel()

    async def _receive(self, requests: AsyncIterator[bytes]) -> None:
        try:
            async for data in requests:
                await self._window.acquire()
                self._accept(data)
                del data  # otherwise an answered request would stay in memory until the next one arrives
        finally:
            self._answers.put_nowait(None)

    def _accept(self, data: bytes) -> None:
        accepted = _Accepted()
        header, raw, error = b"", list[memoryview](), None
        try:
            try:
                header, raw = codec.REQUEST.split(data)
            except ProtocolError as exc:
                raise malformed_message(data, str(exc)) from exc
            self._handler.lifecycle.begin_request()
            accepted.counted.callback(self._handler.lifecycle.end_request)
            self._client.hold_bytes(len(data))
            accepted.counted.callback(self._client.release_bytes, len(data))
        except RequestError as exc:
            error = exc.with_traceback(None)  # a traceback with this frame would be a cycle that keeps the request
        accepted.task = asyncio.ensure_future(self._respond(accepted, header, raw, len(data), error))
        self._accepted.add(accepted)
        self._answers.put_nowait(accepted)

    async def _respond(
        self, accepted: _Accepted, header: bytes, raw: list[memoryview], nbytes: int, error: RequestError | None
    ) -> bytes:
        """Return a `ModelStreamInferResponse` as bytes; with an `error`, the request is refused."""
        answer: bytes | RequestError
        if error is not None:
            self._handler.record_error(error, self._call, _id_of(header), nbytes)
            answer = error
        else:
            answer = await self._handler.answer(self._call, header, raw, nbytes, "", None, codec.join_streamed_response)
        if isinstance(answer, RequestError):
            found = kserve.ModelInferResponse(model_name=self._handler.model.name, id=_id_of(header))
            message = kserve.ModelStreamInferResponse(error_message=answer.message, infer_response=found)
            return bytes(message.SerializeToString())
        self._client.nbytes += len(answer)
        accepted.counted.callback(self._client.release_bytes, len(answer))
        return answer

    def _release(self, accepted: _Accepted) -> None:
        self._accepted.discard(accepted)
        self._window.release()
        accepted.counted.close()


def _id_of(header: bytes) -> str:
    """Return the id of a refused request; empty if the header has no readable id."""
    try:
        return str(codec.REQUEST.parse(header).id)
    except ProtocolError:
        return ""


def _unary(kind: type[Message], answer: Answer) -> grpc.RpcMethodHandler[Any, Any]:
    async def handle(data: bytes, context: ServicerContext) -> bytes:
        try:
            try:
                request = kind.FromString(data)
            except DecodeError as exc:
                raise malformed_message(data, f"malformed {kind.__name__}: {exc}") from exc
            return answer(request, context).SerializeToString()
        except RequestError as error:
            await context.abort(error.code, error.message, error.trailing_metadata)

    return grpc.unary_unary_rpc_method_handler(handle)


def _refusing(words: str) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(data: bytes, context: ServicerContext) -> bytes:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, words)

    return grpc.unary_unary_rpc_method_handler(refuse)
