"""`TeacherClient`, a connection to a teacher that sends requests and receives answers.

A request goes to a teacher of ours over the tensor channel, and otherwise as a gRPC call of KServe v2: to every other
server, with TLS, and where the channel's port cannot be reached. Its tensors are in shared memory if the server is on
this host, otherwise in the message. A request that fails in shared memory, which the server may have lost, is sent once
more in the other way. Every error is a `RequestFailure` for the dispatcher.

`probe` inspects the server, and `replies` checks the answers. Retries and the choice of teachers are made elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from edl.distill.dispatch.actions import FailureKind, RequestFailure
from edl.distill.options import Options
from edl.distill.transport.calls import (
    RequestFailed,
    RequestIds,
    ServerCalls,
    compression_hint,
    failure_of_call,
    max_answer_nbytes,
)
from edl.distill.transport.channel import Body, TensorChannel, open_channel
from edl.distill.transport.probe import ServerModel, fetch_spec, probe_model
from edl.distill.transport.replies import ReplyReader
from edl.distill.transport.request import Payload, request_header
from edl.distill.transport.schema import ModelSpec, OutputSpec, Reply
from edl.distill.transport.shm import RegionNames, ShmRegistrations, is_about_memory
from edl.errors import ProtocolError
from edl.protocol import codec, kserve, names
from edl.protocol.tls.credentials import CredentialFiles
from edl.protocol.transport import grpc
from edl.quoting import quote

logger = logging.getLogger("edl.distill")

_PLACEHOLDER_ID = "-" * 16  # a server of ours knows a request's header again, if nothing in it is new
_TRY_AGAIN_S = 30.0  # between two attempts to open a channel
_ABOUT_REQUEST = (FailureKind.REJECTED, FailureKind.ERROR)
_MOST_HEADERS = 1024
"""Number of cached request headers, one for each shape and slot of shared memory."""

Done: TypeAlias = Callable[[Reply | RequestFailure | None], None]
"""Called once on the event loop with the result of a request, or None if it was cancelled."""


@dataclass(eq=False)
class _Request:
    """A request without an answer."""

    payload: Payload
    timeout_s: float
    deadline: float  # on the monotonic clock
    done: Done
    region: str | None = None  # the name of the shared memory that its tensors lie in; None in the message
    number: str = ""  # on the channel
    task: asyncio.Task[Reply] | None = None  # for gRPC calls, and for sending it again in another way
    cancelled: bool = False


class TeacherClient:
    """A connection to a teacher. All methods run on the event loop of the reader.

    Args:
        endpoint: `host:port`, or `unix:` and a path.
        output_spec: What the student asks for.
        shared_memory: Whether to use shared memory if the teacher is on this host.
        region_names: Names under which the teacher knows shared memory, from earlier connections too.
        files: Certificates and tokens, None for neither.
        options: Says how large messages may be.
        on_lost: Called with this client and the reason when a request finds the connection lost.
        authority: `name:port` that the teacher's certificate is checked for; empty if that is the endpoint.
    """

    def __init__(
        self,
        endpoint: str,
        output_spec: OutputSpec,
        *,
        shared_memory: bool = True,
        region_names: RegionNames | None = None,
        files: CredentialFiles | None = None,
        options: Options | None = None,
        on_lost: Callable[[TeacherClient, str], None] = lambda client, why: None,
        authority: str = "",
    ) -> None:
        self.endpoint = endpoint
        self.output_spec = output_spec
        self.shares_memory = shared_memory and _is_local(endpoint)
        self._on_lost = on_lost
        self._calls = ServerCalls(endpoint, files, options, authority)
        self._server = ServerModel(ModelSpec("", "", {}, {}))
        self._replies = ReplyReader(endpoint, output_spec, self._server)
        self._regions = ShmRegistrations(self._calls.call, endpoint, {} if region_names is None else region_names)
        self._infer: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] | None = None
        self._channel: TensorChannel | None = None
        self._opening: asyncio.Task[None] | None = None
        self._headers: dict[Any, bytes] = {}
        self._ids = RequestIds()
        self._requests: set[_Request] = set()
        self._closing: asyncio.Task[None] | None = None
        self._retired = False
        self._closed = False

    @property
    def spec(self) -> ModelSpec:
        """The model, with the version named in its last answer."""
        return self._replies.spec

    async def open(self, timeout_s: float) -> ModelSpec:
        """Connect, check that the server is ready, and fetch its model's metadata.

        Raises:
            RequestFailed: LOST if the server cannot be reached or is not ready.
            TeacherLacks: It lacks the model, does not say which it has, or requires a token that this student lacks.
        """
        deadline = time.monotonic() + timeout_s
        self._calls.authorize()
        server = await probe_model(self._calls, self.output_spec, deadline)
        if await self._calls.allow_answers(max_answer_nbytes(server.spec, self._calls.options.max_answer_bytes)):
            server = await probe_model(self._calls, self.output_spec, deadline)
        if self.output_spec.version and not server.named_version:
            logger.warning(
                "%s does not say which version of model %r it has: its labels are taken for those of version %r, as "
                "version= names it",
                self.endpoint,
                server.spec.name,
                self.output_spec.version,
            )
        self._server = server
        self._replies = ReplyReader(self.endpoint, self.output_spec, server)
        self._infer = self._calls.channel.unary_unary(names.method("ModelInfer"))
        self.shares_memory = self.shares_memory and names.EXTENSION_SHARED_MEMORY in server.extensions
        if names.EXTENSION_CHANNEL in server.extensions and self._channel is None:
            try:
                self._channel = await open_channel(self._calls, self._ids, deadline)
            except RequestFailed as exc:
                if exc.failure.kind is FailureKind.OVERLOADED:  # as many are open as the server takes
                    raise
                logger.info(
                    "the tensor channel cannot be opened, so requests go over gRPC, which is slower: %s",
                    exc.failure.message,
                )
                self._opening = asyncio.get_running_loop().create_task(self._open_channel_later())
        return server.spec

    async def _open_channel_later(self) -> None:
        """Try again to open a channel, from time to time: what kept it from opening may pass."""
        while self._channel is None:
            await asyncio.sleep(_TRY_AGAIN_S)
            with contextlib.suppress(RequestFailed):
                self._channel = await open_channel(self._calls, self._ids, math.inf)

    async def refresh_spec(self, timeout_s: float) -> ModelSpec:
        """Check that server and model are still ready, and return the present metadata; see `open` for errors."""
        deadline = time.monotonic() + timeout_s
        for method, request in (
            ("ServerReady", kserve.ServerReadyRequest()),
            ("ModelReady", kserve.ModelReadyRequest(name=self.spec.name, version=self._server.named_version)),
        ):
            if not (await self._calls.call(method, request, deadline)).ready:
                raise RequestFailed(FailureKind.LOST, f"{self.endpoint} is not ready any more")
        return await fetch_spec(self._calls, self.output_spec, self._server, self.spec, deadline)

    def start(self, payload: Payload, timeout_s: float, done: Done) -> Callable[[], None]:
        """Ask for the outputs of `payload`; return a function that cancels the request.

        `done` is called once, after this returns: with the outputs (read-only [rows, ...], or `TopK` if
        `output_spec.top_k` is set), with a failure, or with None if the request was cancelled.

        Most requests go over the channel without a task of their own, which saves the event loop some turns.
        """
        request = _Request(payload, timeout_s, time.monotonic() + timeout_s, done)
        self._requests.add(request)
        if not self._start_on_channel(request):
            self._start_task(request, self._send(request))
        return functools.partial(self._cancel, request)

    def retire(self) -> None:
        """Close the connection once its last request has ended. A new connection goes on using the shared memory."""
        self._retired = True
        self._close_if_idle()

    async def close(self, *, unregister: bool = True) -> None:
        """Close the connection; pending requests end with LOST. May be called twice.

        `unregister` says whether to unregister shared memory, which must stay if another connection uses it.
        """
        if self._closing is not None and self._closing is not asyncio.current_task():
            await self._closing
        if self._closed:
            return
        self._closed = True
        for request in list(self._requests):
            if request.task is not None:
                request.task.cancel()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._channel is not None:
            self._channel.close()
        if unregister and self._calls.channel.get_state() is grpc.ChannelConnectivity.READY:
            await self._regions.close()
        await self._calls.channel.close()

    # Requests

    def _start_on_channel(self, request: _Request) -> bool:
        """Send a request over the channel, if it can be sent there now."""
        channel, slot = self._channel, request.payload.slot
        if channel is None or channel.broken:
            return False
        if slot is not None and self.shares_memory:
            request.region = self._regions.name_of(slot.region)
            if request.region is None:
                return False
        done = functools.partial(self._answered, request)
        request.number = channel.start(*self._message(request), request.timeout_s, done)
        return True

    def _start_task(self, request: _Request, work: Coroutine[Any, Any, Reply]) -> None:
        request.task = asyncio.get_running_loop().create_task(work)
        request.task.add_done_callback(functools.partial(self._task_ended, request))

    def _cancel(self, request: _Request) -> None:
        request.cancelled = True
        if request.task is not None:
            request.task.cancel()
        elif self._channel is not None:
            self._channel.cancel(request.number)

    def _answered(self, request: _Request, answer: Body | RequestFailure | None) -> None:
        """Handle an answer from the channel, or send the request in another way if that may succeed."""
        result: Reply | RequestFailure | None = None
        if isinstance(answer, tuple):
            try:
                result = self._replies.read(answer, request.payload)
            except RequestFailed as exc:
                result = replace(exc.failure, message=f"{exc.failure.message} (request {request.number})")
            except Exception as exc:
                # End only this request, whatever the error; the channel must survive it.
                logger.exception("an answer of %s was not understood, in a way not foreseen", self.endpoint)
                result = RequestFailure(FailureKind.ERROR, f"{self.endpoint}: {type(exc).__name__}: {exc}")
        elif answer is not None and self._may_succeed_otherwise(request, answer):
            self._start_task(request, self._send_otherwise(request, answer))
            return
        else:
            result = answer
        self._finish(request, result)

    def _task_ended(self, request: _Request, task: asyncio.Task[Reply]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            self._finish(request, task.result())
        elif request.cancelled:
            self._finish(request, None)
        elif task.cancelled() or self._closed:  # gRPC cancels what is under way, and refuses what comes later
            closed = RequestFailure(FailureKind.LOST, f"{self.endpoint}: the connection was closed")
            self._finish(request, closed)
        elif isinstance(error, RequestFailed):
            self._finish(request, error.failure)
        else:
            logger.error("a request to %s failed in a way not foreseen", self.endpoint, exc_info=error)
            words = f"{self.endpoint}: {type(error).__name__}: {error}"
            self._finish(request, RequestFailure(FailureKind.ERROR, words))

    def _finish(self, request: _Request, result: Reply | RequestFailure | None) -> None:
        self._requests.discard(request)
        if isinstance(result, RequestFailure) and result.kind is FailureKind.LOST:
            self._on_lost(self, result.message)
        request.done(result)
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._retired and not self._requests and not self._closed and self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self.close(unregister=False))

    async def _send(self, request: _Request) -> Reply:
        """Send a request as a gRPC call, or one whose shared memory the server does not know yet."""
        if self._is_lost:
            raise RequestFailed(
                FailureKind.LOST, f"{self.endpoint}: the connection was lost or closed before this request"
            )
        slot = request.payload.slot
        if slot is not None and self.shares_memory:
            request.region = await self._regions.register(slot.region, request.deadline)
            self.shares_memory = self.shares_memory and request.region is not None
        try:
            return await self._send_once(request)
        except RequestFailed as exc:
            if not self._may_succeed_otherwise(request, exc.failure):
                raise
            failure = exc.failure
        return await self._send_otherwise(request, failure)

    async def _send_otherwise(self, request: _Request, failure: RequestFailure) -> Reply:
        """Send a request again that failed in shared memory, which the teacher may have lost.

        If the teacher does not know the memory, it is registered again first. Otherwise, or if that fails, the tensors
        are sent in the message.
        """
        slot, region = request.payload.slot, request.region
        if region is not None and slot is not None and is_about_memory(failure, region):
            request.region = await self._regions.register_again(slot.region, region, request.deadline)
            self.shares_memory = self.shares_memory and request.region is not None
            if request.region is not None:
                try:
                    return await self._send_once(request)
                except RequestFailed as exc:
                    if not self._may_succeed_otherwise(request, exc.failure):
                        raise
        request.region = None
        return await self._send_once(request)

    async def _send_once(self, request: _Request) -> Reply:
        header, raw = self._message(request)
        if self._channel is None:
            return await self._call(request, header, raw)
        left_s = max(request.deadline - time.monotonic(), 0.001)
        return self._replies.read(await self._channel.infer(header, raw, left_s), request.payload)

    async def _call(self, request: _Request, header: bytes, raw: Sequence[codec.Buffer]) -> Reply:
        assert self._infer is not None, "it was opened"
        number = next(self._ids)
        request_id = _PLACEHOLDER_ID if self._server.is_edl else number
        trace = request.payload.traceparent or self._ids.traceparent
        metadata = (*self._calls.metadata, (names.REQUEST_ID, number), (names.TRACEPARENT, trace))
        left_s = max(request.deadline - time.monotonic(), 0.001)
        message = codec.join_request(header + codec.id_field(request_id), raw)
        call = self._infer(message, timeout=left_s, metadata=metadata)
        del message
        try:
            answer = await call
        except grpc.aio.AioRpcError as exc:
            failure = failure_of_call(exc, self.endpoint, number).failure
            hint = self._replies.rows_hint(request.payload.rows) if failure.kind in _ABOUT_REQUEST else ""
            raise RequestFailed(failure.kind, failure.message + hint, failure.retry_after_s) from exc
        try:
            found, parts, answered_id = codec.split_identified_response(answer)
        except ProtocolError as exc:
            raise RequestFailed(FailureKind.BAD_OUTPUT, f"{self.endpoint}: {exc}{compression_hint(answer)}") from exc
        if answered_id and answered_id != request_id:
            what = f"its answer is to request {quote(answered_id)}, and {request_id!r} was asked"
            raise self._replies.unusable(what)
        return self._replies.read((found, parts), request.payload)

    @staticmethod
    def _may_succeed_otherwise(request: _Request, failure: RequestFailure) -> bool:
        """Return whether a request may have been refused because of shared memory, so another way may succeed."""
        if request.region is None:
            return False
        return failure.kind is FailureKind.REJECTED or is_about_memory(failure, request.region)

    @property
    def _is_lost(self) -> bool:
        """Whether the channel has ended, so that another server without our regions may now be at this address."""
        return self._closed or (self._channel is not None and self._channel.broken)

    def _message(self, request: _Request) -> tuple[bytes, Sequence[codec.Buffer]]:
        """Return a request's header, without its id, and the tensors that go in the message."""
        payload, region = request.payload, request.region
        key: Any = (payload.inputs, request.timeout_s, payload.traceparent)
        if region is not None and payload.slot is not None:
            key = (*key, region, payload.slot.offset)
        header = self._headers.get(key)
        if header is None:
            if len(self._headers) > _MOST_HEADERS:
                self._headers.clear()
            header = request_header(
                self.output_spec,
                self.spec.name,
                payload,
                compressed=names.EXTENSION_TOP_K in self._server.extensions,
                region=region,
                version=self._server.named_version,
                priority=self._server.priority.level,
            )
            if self._server.is_edl:
                header += _parameters(request.timeout_s, payload.traceparent)
            self._headers[key] = header
        return header, payload.raw if region is None else ()


def _is_local(endpoint: str) -> bool:
    host = endpoint.rpartition(":")[0].strip("[]")
    return endpoint.startswith("unix:") or host in ("localhost", "::1") or host.startswith("127.")


def _parameters(timeout_s: float, traceparent: str) -> bytes:
    """Protobuf messages add up when their bytes are joined."""
    message = kserve.ModelInferRequest()
    message.parameters[names.TIMEOUT_MS].int64_param = round(timeout_s * 1000)
    if traceparent:
        message.parameters[names.TRACEPARENT].string_param = traceparent
    return bytes(message.SerializeToString())
