"""KServe v2's methods as gRPC handlers that take and return bytes.

gRPC gets no (de)serializers. `edl.protocol.codec` splits inference requests without copying tensors, and a message that
does not parse is answered with INVALID_ARGUMENT instead of gRPC's own INTERNAL.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from google.protobuf.message import DecodeError, Message

from edl import __version__
from edl.errors import ProtocolError
from edl.protocol import bundles, codec, fragments, kserve, names
from edl.protocol.codec import Buffer
from edl.protocol.transport import grpc
from edl.quoting import clip, quote
from edl_serving.admission import ConnectionLimiter, Lifecycle, ServicerContext, StreamSlot, client_of
from edl_serving.batching.batch_queue import InferenceJob
from edl_serving.batching.batcher import Batcher
from edl_serving.model import ServedModel
from edl_serving.monitoring import AccessLog, Metrics
from edl_serving.request import RequestDecoder
from edl_serving.request_error import RequestError, invalid_argument, malformed_message
from edl_serving.request_plan import request_id_of, valid_traceparent
from edl_serving.shared_memory import ClientRegions, RegionTable

_log = logging.getLogger(__name__)


Answer: TypeAlias = Callable[[Any, ServicerContext], Message]
_ONE_MODEL = "this server has one model: start another with edl serve, and end one with SIGTERM"
_SYSTEM_MEMORY = "this server takes system shared memory only: SystemSharedMemoryRegister"
_ELSEWHERE = {
    "RepositoryModelLoad": _ONE_MODEL,
    "RepositoryModelUnload": _ONE_MODEL,
    "CudaSharedMemoryStatus": _SYSTEM_MEMORY,
    "CudaSharedMemoryRegister": _SYSTEM_MEMORY,
    "CudaSharedMemoryUnregister": _SYSTEM_MEMORY,
    "TraceSetting": "this server makes no traces: send traceparent, and read it in edl serve --access-log",
    "LogSettings": "the server's logging is set when it starts: edl serve --verbose and --log-format",
}
"""Triton's methods that this server does not implement, and what to use instead."""


class InferenceServicer:
    """Answers KServe v2's methods; `regions` and `access` are None if they are turned off."""

    def __init__(
        self,
        model: ServedModel,
        max_rows: int,
        lifecycle: Lifecycle,
        batcher: Batcher,
        regions: RegionTable | None,
        clients: ConnectionLimiter,
        metrics: Metrics,
        access: AccessLog | None = None,
    ) -> None:
        self.model = model
        self.lifecycle = lifecycle
        self.metrics = metrics
        self._decoder = RequestDecoder(model, max_rows)
        self._batcher = batcher
        self.regions = regions
        self.clients = clients
        self._access = access
        self._streams: set[InferStream] = set()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return gRPC's handler for all methods of the service."""
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
        return grpc.method_handlers_generic_handler(names.SERVICE, handlers)

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
        """Report the calls of the model by their rows. As with Triton, a request without a name means all models."""
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
        """Refuse a student that exceeds the limits when it connects, rather than at its first request."""
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
        """Answer `ModelInfer`."""
        answer = await self._answer_call(data, context)
        del data  # gRPC keeps the exception of `abort`, and with it this frame, until garbage is collected
        if isinstance(answer, RequestError):
            await context.abort(answer.code, answer.message, answer.trailing_metadata)
        return answer

    async def _answer_call(self, data: bytes, context: ServicerContext) -> bytes | RequestError:
        """Return the response to a call, or the error that refuses it."""
        call, metadata = self._open_call(context)
        request_id, nbytes = request_id_of(metadata), len(data)
        try:
            self.lifecycle.begin_request()
            _after_call(context, self.lifecycle.end_request)
            client = self.clients.open_call(call.client)
            _after_call(context, lambda: self.clients.close_call(client))
            client.hold_bytes(nbytes)
            _after_call(context, lambda: client.release_bytes(nbytes))
            try:
                header, raw = codec.split_request(data)
            except ProtocolError as exc:
                raise malformed_message(data, str(exc)) from exc
        except RequestError as error:
            self.record_error(error, call, request_id, nbytes)
            return error.copy()
        try:
            answer = await self.answer(call, header, raw, nbytes, request_id, None)
        except asyncio.CancelledError:
            self.metrics.record_outcome("cancelled")
            raise
        if isinstance(answer, bytes):
            sent_nbytes = len(answer)
            client.nbytes += sent_nbytes
            _after_call(context, lambda: client.release_bytes(sent_nbytes))
        return answer

    async def answer(
        self, call: Call, header: bytes, raw: list[memoryview], nbytes: int, request_id: str, id_bytes: bytes | None
    ) -> bytes | RequestError:
        """Compute a request of a call or stream; return the response, or the error."""
        job = None
        try:
            request = await self._decoder.decode(header, raw, call.regions)
            request_id = request_id or request.plan.id
            limits = (request.plan.timeout_s, call.context.time_remaining())
            timeout_s = min((limit for limit in limits if limit is not None), default=None)
            job = InferenceJob.of(request, timeout_s, call.client, nbytes, request_id, id_bytes)
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
        """Answer `ModelStreamInfer`; see `InferStream`."""
        call, metadata = self._open_call(context)
        try:
            slot = StreamSlot(self.clients, call.client)
        except RequestError as exc:
            self.metrics.record_rejected_call(exc)
            await context.abort(exc.code, exc.message, exc.trailing_metadata)
        stream = InferStream(self, call, slot, metadata)
        self._streams.add(stream)
        try:
            await stream.run(requests)
        finally:
            self._streams.discard(stream)
            slot.close()

    def end_streams(self) -> None:
        """End all open streams once their pending responses are sent."""
        for stream in self._streams:
            stream.end()

    def record_error(
        self, error: RequestError, call: Call, request_id: str, nbytes: int, job: InferenceJob | None = None
    ) -> None:
        """Count and log a request that ended with an error."""
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
        return Call(context, client_of(context), traceparent, regions), metadata


class Call(NamedTuple):
    """A call or stream: its client, its trace span (empty if none was sent), and the shared memory it may use."""

    context: ServicerContext
    client: str
    traceparent: str
    regions: ClientRegions | None


def _after_call(context: ServicerContext, done: Callable[[], object]) -> None:
    context.add_done_callback(lambda _: done())  # type: ignore[arg-type]  # the stub's type is a class


_Parts: TypeAlias = tuple[bytes, list[memoryview], str, RequestError | None]
_Admission: TypeAlias = tuple[bool, int | None]
"""Whether the lifecycle counts a request, and how many bytes count towards its client's limit (None if refused)."""
_WINDOW = 64  # requests of one stream that are processed at a time; the others wait in the connection
_BUNDLE_NBYTES = 1 << 20  # answers in one message; copying a larger bundle costs more than separate messages
_CANCEL = kserve.ModelInferRequest(
    parameters={names.CANCEL: kserve.InferParameter(bool_param=True)}
).SerializeToString()


class InferStream:
    """Answers the requests of a stream in order or, if the call's metadata ask for it, as soon as each is ready.

    An error ends its request, not the stream.
    """

    def __init__(
        self, handler: InferenceServicer, call: Call, slot: StreamSlot, metadata: Mapping[str, str | bytes]
    ) -> None:
        self._handler = handler
        self._call = call
        self._slot = slot
        self._ordered = names.UNORDERED not in metadata
        self._bundles = names.BUNDLES in metadata and not self._ordered
        self._defragmenter = fragments.Defragmenter(
            handler.model.max_message_bytes, slot.hold_bytes, slot.release_bytes
        )
        self._window = asyncio.Semaphore(_WINDOW)
        self._answers: deque[asyncio.Task[bytes] | None] = deque()
        self._wake = asyncio.Event()
        self._entered: dict[asyncio.Task[bytes], _Admission] = {}  # all whose response is not written yet
        self._computing: dict[str, asyncio.Task[bytes]] = {}  # by id, on unordered streams
        self._receiver: asyncio.Task[None] | None = None
        self._last = False

    async def run(self, requests: AsyncIterator[bytes]) -> None:
        """Answer requests until the client, or `end`, ends the stream and all requests have been answered."""
        self._receiver = asyncio.create_task(self._receive(requests))
        try:
            while (task := await self._next_answer()) is not None:
                tasks, message = self._bundle_ready(task, await task)
                await self._call.context.write(message)
                for written in tasks:
                    self._release(written)
            if self._receiver.done() and not self._receiver.cancelled():
                self._receiver.result()
        finally:
            self._receiver.cancel()
            for task in self._entered:
                task.cancel()
            await asyncio.gather(self._receiver, *self._entered, return_exceptions=True)
            for task in list(self._entered):
                self._release(task)
            self._defragmenter.drop()

    def end(self) -> None:
        """Stop accepting requests, and end the stream after the last response."""
        if self._receiver is not None:
            self._receiver.cancel()

    # Out

    def _answer(self, task: asyncio.Task[bytes] | None) -> None:
        self._answers.append(task)
        self._wake.set()

    async def _next_answer(self) -> asyncio.Task[bytes] | None:
        while not self._answers:
            self._wake.clear()
            await self._wake.wait()
        return self._answers.popleft()

    def _bundle_ready(self, task: asyncio.Task[bytes], answer: bytes) -> tuple[list[asyncio.Task[bytes]], bytes]:
        """Return a message with this response and, if the client accepts bundles, with others that are ready."""
        tasks, answers, nbytes = [task], [answer], len(answer)
        while self._bundles and self._answers and (other := self._answers[0]) is not None:
            if other.cancelled() or other.exception() is not None:
                break  # handled when its own turn comes
            nbytes += len(other.result())
            if nbytes > _BUNDLE_NBYTES:
                break
            tasks.append(other)
            answers.append(other.result())
            self._answers.popleft()
        return tasks, answer if len(answers) == 1 else bundles.join_responses(answers)

    # In

    async def _receive(self, requests: AsyncIterator[bytes]) -> None:
        try:
            async for data in requests:
                for parts in self._messages(data):
                    await self._window.acquire()
                    self._accept(*parts)
                    del parts
                del data  # otherwise an answered request would stay in memory until the next one arrives
        finally:
            self._last = True
            if self._ordered or not self._entered:
                self._answer(None)

    def _messages(self, data: bytes) -> Iterator[_Parts]:
        """Yield the message, the messages in it if it is a bundle, or the request whose last fragment it is."""
        header, raw, request_id, error = _split(data)
        if fragments.is_fragment(header) and not self._ordered:
            try:
                whole = self._defragmenter.add(raw, request_id)
            except ProtocolError as exc:
                yield header, [], request_id, invalid_argument(str(exc))
                return
            except RequestError as exc:
                yield header, [], request_id, exc
                return
            if whole is not None:
                yield _split(whole)
            return
        if not bundles.is_bundle(header):
            yield header, raw, request_id, error
            return
        fault = ""
        if len(data) > bundles.MOST_REQUEST_NBYTES:
            fault = f"{len(data):,} bytes, at most {bundles.MOST_REQUEST_NBYTES:,}"
        elif self._ordered:
            fault = f"the stream was not opened with {names.UNORDERED}"
        elif request_id or not raw:
            fault = f"has the id {quote(request_id)} and {len(raw)} messages"
        if fault:
            yield header, raw, request_id, _bundle_error(fault)
            return
        for message in raw:
            part = _split(message)
            yield (*part[:3], _bundle_error("lies within another one")) if bundles.is_bundle(part[0]) else part

    def _accept(self, header: bytes, raw: list[memoryview], request_id: str, error: RequestError | None) -> None:
        if header == _CANCEL and not self._ordered:
            self._window.release()
            self._defragmenter.drop(request_id)
            if request_id in self._computing:
                self._computing[request_id].cancel()
            return
        entered, held = False, None
        nbytes = len(header) + sum([len(tensor) for tensor in raw])
        if error is None:
            try:
                self._handler.lifecycle.begin_request()
                entered = True
                self._slot.hold_bytes(nbytes)
                held = nbytes
            except RequestError as exc:
                error = exc.with_traceback(None)  # a traceback with this frame would be a cycle that keeps the request
        task = asyncio.ensure_future(self._respond(header, raw, nbytes, request_id, error))
        self._entered[task] = entered, held
        if self._ordered:
            task.add_done_callback(self._hold_response)
            self._answer(task)
        else:
            self._computing[request_id] = task
            task.add_done_callback(lambda task: self._computed(request_id, task))

    async def _respond(
        self, header: bytes, raw: list[memoryview], nbytes: int, request_id: str, error: RequestError | None
    ) -> bytes:
        """Return the bytes of a `ModelStreamInferResponse`; `error` refuses the request."""
        if error is not None:
            self._handler.record_error(error, self._call, request_id, nbytes)
            return _encode_error(error, self._handler.model.name, request_id)
        id_bytes = codec.id_field(request_id) if request_id else b""
        answer = await self._handler.answer(self._call, header, raw, nbytes, request_id, id_bytes)
        return answer if isinstance(answer, bytes) else _encode_error(answer, self._handler.model.name, request_id)

    def _computed(self, request_id: str, task: asyncio.Task[bytes]) -> None:
        if self._computing.get(request_id) is task:
            del self._computing[request_id]
        if task.cancelled():
            self._release(task)
        else:
            self._hold_response(task)
            self._answer(task)

    def _hold_response(self, task: asyncio.Task[bytes]) -> None:
        client = self._slot.client
        if client is not None and not task.cancelled() and task.exception() is None and task in self._entered:
            _, held = self._entered[task]
            if held is not None:
                client.nbytes += len(task.result())
                self._entered[task] = self._entered[task][0], held + len(task.result())

    def _release(self, task: asyncio.Task[bytes]) -> None:
        taken = self._entered.pop(task, None)
        if taken is None:
            return
        entered, held = taken
        self._window.release()
        if held is not None:
            self._slot.release_bytes(held)
        if task.cancelled():  # counted here, since a request cancelled in its own message never runs
            self._handler.metrics.record_outcome("cancelled")
        if entered:
            self._handler.lifecycle.end_request()
        if self._last and not self._ordered and not self._entered:
            self._answer(None)


def _split(data: Buffer) -> _Parts:
    try:
        return (*codec.split_streamed_request(data), None)
    except ProtocolError as exc:
        return b"", [], "", malformed_message(data, str(exc))


def _bundle_error(how: str) -> RequestError:
    return invalid_argument(f"parameter {names.BUNDLE}: {how}")


def _encode_error(error: RequestError, model: str, request_id: str) -> bytes:
    """Return a `ModelStreamInferResponse` with what a unary call would put into status and trailing metadata."""
    answer = kserve.ModelInferResponse(model_name=model, id=request_id)
    answer.parameters[names.STATUS].string_param = error.code.name
    if error.retry_after_ms is not None:
        answer.parameters[names.RETRY_AFTER].int64_param = error.retry_after_ms
    message = kserve.ModelStreamInferResponse(error_message=error.message, infer_response=answer)
    return bytes(message.SerializeToString())


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

    handler: Callable[[bytes, ServicerContext], Awaitable[bytes]] = handle
    return grpc.unary_unary_rpc_method_handler(handler)


def _refusing(words: str) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(data: bytes, context: ServicerContext) -> bytes:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, words)

    return grpc.unary_unary_rpc_method_handler(refuse)
