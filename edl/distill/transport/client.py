"""`TeacherClient`, the connection to a teacher that sends requests and receives answers.

Requests to an EDL teacher use the tensor channel. If the channel's port is unreachable, and with other servers,
requests are gRPC calls of KServe v2. Tensors are in shared memory if the server is on this host, otherwise in the
message. If a request in shared memory fails because of that memory, it is sent again, in a message or after registering
the memory again. Every error is a `RequestFailure`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from edl.distill.compress import TopK, to_float16, top_k
from edl.distill.dispatch.actions import FailureKind, RequestFailure
from edl.distill.options import Options
from edl.distill.transport.calls import (
    RequestFailed,
    RequestIds,
    ServerCalls,
    compression_hint,
    failure_of_call,
    fetch_spec,
    is_name,
    probe_model,
)
from edl.distill.transport.channel import Body, TensorChannel, open_channel
from edl.distill.transport.request import Payload, request_header
from edl.distill.transport.schema import ModelSpec, OutputSpec, Reply, kserve_datatype
from edl.distill.transport.shm import RegionNames, ShmRegistrations, is_about_memory
from edl.errors import ProtocolError, SettingsError
from edl.protocol import codec, kserve, names, tensors
from edl.protocol.channel import is_this_host
from edl.protocol.tensors import Array
from edl.protocol.tls import CredentialFiles
from edl.protocol.transport import grpc
from edl.quoting import listed, quote

logger = logging.getLogger("edl.distill")

_PLACEHOLDER_ID = "-" * 16  # an EDL server recognizes a request's header if nothing in it is new
_TRY_AGAIN_S = 30.0  # between two attempts to open a channel
_ABOUT_REQUEST = (FailureKind.REJECTED, FailureKind.ERROR)
_MOST_HEADERS = 1024  # cached request headers, one per shape and slot of shared memory
_MOST_ANSWER_HEADERS = 64  # answer headers recognized by their bytes; requests of one shape have one
_LONGEST_HEADER = 4096  # bytes of the longest answer header worth remembering
_FLOATING = ("FP16", "FP32", "FP64", "BF16")  # the types that `dtype` converts

Done: TypeAlias = Callable[[Reply | RequestFailure | None], None]
"""Called once on the event loop, with the result of a request, or with None if the request was cancelled."""


@dataclass(eq=False)
class _Request:
    payload: Payload
    timeout_s: float
    deadline: float  # on the monotonic clock
    done: Done
    region: str | None = None  # the name of the shared memory with its tensors; None if they are in the message
    number: str = ""  # id on the channel
    task: asyncio.Task[Reply] | None = None  # for gRPC calls and resends
    cancelled: bool = False


class TeacherClient:
    """A connection to a teacher. All methods run on the event loop of the reader.

    Args:
        endpoint: `host:port`, or `unix:` and a path.
        shared_memory: Whether to use shared memory if the teacher is on this host.
        region_names: Names under which the teacher knows shared memory, including names from earlier connections.
        on_lost: Called with this client and the reason when a request finds the connection lost.
        authority: `name:port` that the teacher's certificate must match; empty for the endpoint.
        over_channel: Whether to open a tensor channel at once instead of later.
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
        over_channel: bool = True,
    ) -> None:
        self.endpoint = endpoint
        self.output_spec = output_spec
        self._over_channel = over_channel
        self.shares_memory = shared_memory and is_this_host(endpoint)
        self._on_lost = on_lost
        self._calls = ServerCalls(endpoint, files, options, authority)
        self._replies = ReplyReader(endpoint, output_spec, ModelSpec("", "", {}, {}))
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
        """The model, with the version stated in its last answer."""
        return self._replies.spec

    async def open(self, timeout_s: float) -> ModelSpec:
        """Connect, check that the server is ready, and fetch its model's metadata; raise errors like `probe_model`."""
        deadline = time.monotonic() + timeout_s
        self._calls.authorize()
        spec = await probe_model(self._calls, self.output_spec, deadline)
        if self.output_spec.version and not spec.named_version:
            logger.warning(
                "%s does not report its version of model %r: its labels count as those of version %r, as "
                "set with version=",
                self.endpoint,
                spec.name,
                self.output_spec.version,
            )
        self._replies = ReplyReader(self.endpoint, self.output_spec, spec)
        self._infer = self._calls.channel.unary_unary(names.method("ModelInfer"))
        self.shares_memory = self.shares_memory and names.EXTENSION_SHARED_MEMORY in spec.extensions
        if names.EXTENSION_CHANNEL in spec.extensions and self._channel is None:
            try:
                if not self._over_channel:
                    raise RequestFailed(FailureKind.LOST, f"{self.endpoint}: the channel ended before the first answer")
                self._channel = await open_channel(self._calls, self._ids, deadline)
            except RequestFailed as exc:
                if exc.failure.kind is FailureKind.OVERLOADED:  # the server has no room for more channels
                    raise
                logger.info(
                    "the tensor channel cannot be used, so requests go over gRPC, which is slower: %s",
                    exc.failure.message,
                )
                self._opening = asyncio.get_running_loop().create_task(self._open_channel_later())
        return spec

    @property
    def channel_failed(self) -> bool:
        """Whether the channel ended before its first answer, as behind a firewall that blocks the protocol."""
        return self._channel is not None and self._channel.broken and not self._channel.answered

    async def _open_channel_later(self) -> None:
        """Try to open a channel from time to time, because whatever prevents it may be temporary."""
        while self._channel is None:
            await asyncio.sleep(_TRY_AGAIN_S)
            with contextlib.suppress(RequestFailed):
                self._channel = await open_channel(self._calls, self._ids, math.inf)

    async def refresh_spec(self, timeout_s: float, *, must_be_ready: bool = False) -> ModelSpec:
        """Return the model's current metadata. With `must_be_ready`, server and model must be ready, as in `open`."""
        deadline = time.monotonic() + timeout_s
        model = kserve.ModelReadyRequest(name=self.spec.name, version=self.spec.named_version)
        checks = [("ServerReady", kserve.ServerReadyRequest()), ("ModelReady", model)] if must_be_ready else []
        for method, request in checks:
            if not (await self._calls.call(method, request, deadline)).ready:
                raise RequestFailed(FailureKind.LOST, f"{self.endpoint} is no longer ready")
        return await fetch_spec(self._calls, self.output_spec, self.spec, deadline)

    def start(self, payload: Payload, timeout_s: float, done: Done) -> Callable[[], None]:
        """Request the outputs for `payload`; return a function that cancels the request.

        `done` is called once, after this method has returned: with the outputs (read-only [rows, ...], or `TopK` if
        `output_spec.top_k` is set), with a failure, or with None if the request was cancelled.
        """
        request = _Request(payload, timeout_s, time.monotonic() + timeout_s, done)
        self._requests.add(request)
        if not self._start_on_channel(request):
            self._start_task(request, self._send(request))
        return functools.partial(self._cancel, request)

    def retire(self) -> None:
        """Close the connection once its last request has ended. A new connection will use the same shared memory."""
        self._retired = True
        self._close_if_idle()

    async def close(self, *, unregister: bool = True) -> None:
        """Close the connection; pending requests end with LOST. May be called twice.

        `unregister` says whether to unregister shared memory. The memory must stay registered if another connection
        uses it.
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
        result: Reply | RequestFailure | None
        if isinstance(answer, tuple):
            try:
                result = self._replies.read(answer, request.payload)
            except RequestFailed as exc:
                result = replace(exc.failure, message=f"{exc.failure.message} (request {request.number})")
            except Exception as exc:
                # End only this request, whatever the error; the channel must survive it.
                logger.exception("reading an answer of %s failed unexpectedly", self.endpoint)
                result = RequestFailure(FailureKind.ERROR, f"{self.endpoint}: {type(exc).__name__}: {exc}")
        elif answer is not None and self._may_succeed_otherwise(request, answer):
            self._start_task(request, self._send(request, answer))
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
        elif error is None or self._closed:  # gRPC cancels pending calls, and refuses later ones
            closed = RequestFailure(FailureKind.LOST, f"{self.endpoint}: the connection was closed")
            self._finish(request, closed)
        elif isinstance(error, RequestFailed):
            self._finish(request, error.failure)
        else:
            logger.error("a request to %s failed unexpectedly", self.endpoint, exc_info=error)
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

    async def _send(self, request: _Request, failure: RequestFailure | None = None) -> Reply:
        """Send a request as a gRPC call, or with shared memory that the server does not know yet.

        If `failure` is given, the request has already failed in shared memory. If the teacher has lost the memory, the
        memory is registered again, but only once. Otherwise, or if this fails, the tensors are sent in the message.
        """
        # Once the channel has ended, a different server without our regions may be at this address.
        is_lost = self._closed or (self._channel is not None and self._channel.broken)
        if failure is None and is_lost:
            raise RequestFailed(
                FailureKind.LOST, f"{self.endpoint}: the connection was lost or closed before this request"
            )
        slot, tries = request.payload.slot, 2 if failure is None else 1
        while tries and slot is not None and self.shares_memory:
            lost = request.region if failure is not None else None
            if failure is not None and not (lost and is_about_memory(failure, lost)):
                break
            request.region = await self._regions.register(slot.region, request.deadline, lost)
            self.shares_memory = self.shares_memory and request.region is not None
            if request.region is None:
                break
            try:
                return await self._send_once(request)
            except RequestFailed as exc:
                if not self._may_succeed_otherwise(request, exc.failure):
                    raise
                failure, tries = exc.failure, tries - 1
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
        request_id = _PLACEHOLDER_ID if self.spec.is_edl else number
        trace = request.payload.traceparent or self._ids.traceparent
        metadata = (*self._calls.metadata, (names.REQUEST_ID, number), (names.TRACEPARENT, trace))
        left_s = max(request.deadline - time.monotonic(), 0.001)
        message = codec.REQUEST.join(header + codec.id_field(request_id), raw)
        call = self._infer(message, timeout=left_s, metadata=metadata)
        del message
        try:
            answer = await call
        except grpc.aio.AioRpcError as exc:
            failure = failure_of_call(exc, self.endpoint, number).failure
            hint = self._replies.rows_hint(request.payload.rows) if failure.kind in _ABOUT_REQUEST else ""
            raise RequestFailed(failure.kind, failure.message + hint, failure.retry_after_s) from exc
        try:
            body = codec.RESPONSE.split(answer)
        except ProtocolError as exc:
            raise RequestFailed(FailureKind.BAD_OUTPUT, f"{self.endpoint}: {exc}{compression_hint(answer)}") from exc
        return self._replies.read(body, request.payload, request_id)

    @staticmethod
    def _may_succeed_otherwise(request: _Request, failure: RequestFailure) -> bool:
        """Return whether shared memory may be the reason why a request failed, so that a resend may succeed."""
        if request.region is None:
            return False
        return failure.kind is FailureKind.REJECTED or is_about_memory(failure, request.region)

    def _message(self, request: _Request) -> tuple[bytes, Sequence[codec.Buffer]]:
        payload, region = request.payload, request.region
        key: Any = (payload.inputs, request.timeout_s, payload.traceparent)
        if region is not None and payload.slot is not None:
            key = (*key, region, payload.slot.offset)
        header = self._headers.get(key)
        if header is None:
            if len(self._headers) > _MOST_HEADERS:
                self._headers.clear()
            header = request_header(self.output_spec, self.spec, payload, region=region, timeout_s=request.timeout_s)
            self._headers[key] = header
        return header, payload.raw if region is None else ()


class ReplyReader:
    """Reads the answers on one connection. Methods raise `RequestFailed` if an answer cannot be used."""

    def __init__(self, endpoint: str, output_spec: OutputSpec, spec: ModelSpec) -> None:
        self.spec = spec  # with the version named in the last answer, if any version is accepted
        self._endpoint = endpoint
        self._output_spec = output_spec
        self._checks_nan = names.EXTENSION_NO_NAN not in spec.extensions
        self._headers: dict[bytes, tuple[str, list[tuple[str, str, tuple[int, ...]]]]] = {}

    def read(self, answer: Body, payload: Payload, request_id: str = "") -> Reply:
        """Return the outputs for a request's rows, and their version. Refuse an answer to another `request_id`."""
        try:
            version, arrays = self._arrays(*answer, request_id)
            sent = payload.rows + payload.padding
            outputs = {name: self._output(name, arrays, sent) for name in self._output_spec.outputs}
            if payload.padding:
                outputs = {name: output[: payload.rows] for name, output in outputs.items()}
            return Reply(outputs, version)
        except (ProtocolError, SettingsError) as exc:  # SettingsError: arrays that are not valid top-k labels
            raise RequestFailed(FailureKind.BAD_OUTPUT, f"{self._endpoint}: {exc}") from exc

    def unusable(self, what: str) -> RequestFailed:
        """Return the error for an answer that cannot be used."""
        return RequestFailed(FailureKind.BAD_OUTPUT, f"{self._endpoint} (model {self.spec.name!r}): {what}")

    def rows_hint(self, rows: int) -> str:
        """Return a hint in case a request had too many rows for a foreign server, which may not report its limit."""
        if self.spec.is_edl or rows < 2:
            return ""
        return f"; if the model takes fewer than {rows} rows, lower set_teacher_batch_size (batch_rows=)"

    def _arrays(self, header: bytes, raw: list[memoryview], request_id: str) -> tuple[str, dict[str, Array]]:
        known = self._headers.get(header)
        if known is None:
            message = codec.RESPONSE.parse(header)
            if request_id and message.id not in ("", request_id):
                raise self.unusable(f"its answer is to request {quote(message.id)}, not {request_id!r}")
            self._check_model(message.model_name)
            version = self._version(message.model_version)
            self._check_outputs(message.outputs)
            if not raw:
                return version, {
                    tensor.name: tensors.from_contents(tensor.datatype, tensor.shape, tensor.contents)
                    for tensor in message.outputs
                }
            specs = [(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in message.outputs]
            known = version, specs
            if self.spec.is_edl and len(header) <= _LONGEST_HEADER:  # others' headers have a different id each time
                if len(self._headers) >= _MOST_ANSWER_HEADERS:
                    self._headers.clear()
                self._headers[header] = known
        version, specs = known
        if version and version != self.spec.version:
            self._version(version)  # the server may have returned to an earlier version
        if len(raw) != len(specs):
            raise ProtocolError(f"{len(specs)} outputs with {len(raw)} raw contents")
        return version, {
            name: tensors.from_raw(datatype, shape, data)
            for (name, datatype, shape), data in zip(specs, raw, strict=True)
        }

    def _check_model(self, named: str) -> None:
        """Check that an answer is from the requested model; some servers do not state the model in answers."""
        if not named or named == self.spec.name:
            return
        what = f"it answers for model {quote(named)}, but {self.spec.name!r} is requested"
        if self.spec.is_edl:  # another server has taken over the address: a new connection inspects it
            raise RequestFailed(FailureKind.LOST, f"{self._endpoint}: {what}")
        raise self.unusable(what)

    def _check_outputs(self, outputs: Iterable[kserve.ModelInferResponse.InferOutputTensor]) -> None:
        found: set[str] = set()
        for tensor in outputs:
            if tensor.name in found:
                raise self.unusable(f"output {quote(tensor.name)} appears twice in its answer")
            found.add(tensor.name)
            spec, dtype = self.spec.outputs.get(tensor.name), self._output_spec.dtype
            described = spec.datatype if spec is not None else ""
            asked = kserve_datatype(dtype) if dtype is not None and described in _FLOATING else described
            if described and tensor.datatype not in (described, asked):
                raise self.unusable(f"output {tensor.name!r} is {quote(tensor.datatype)}, not {described!r}")

    def _version(self, named: str) -> str:
        """Return an answer's version, given the version that the answer states; empty if unknown.

        gRPC may reconnect to a server that took over the address, and foreign servers may load versions at any time.
        """
        asked, expected = self._output_spec.version, self.spec.version
        unnamed = not named and not self.spec.versions and bool(asked)  # `version=` replaces it
        if self.spec.is_edl and named != expected and not unnamed:
            what = f"{self._endpoint} now has version {named!r} of its model instead of {expected!r}"
            raise RequestFailed(FailureKind.LOST, what)
        if asked:
            if named != expected and (named or self.spec.version_required):
                what = (
                    f"it answers with version {named!r}"
                    if named
                    else "its answer does not say which of several versions it is from"
                )
                raise self.unusable(f"{what}, but version={expected!r} is requested")
            return expected
        if not named:
            return expected if len(self.spec.versions) == 1 else ""
        if named != expected:
            if not is_name(named):
                raise self.unusable(f"it answers with an invalid version {quote(named)}")
            self.spec = replace(self.spec, version=named)
        return named

    def _output(self, name: str, found: dict[str, Array], rows: int) -> Array | TopK:
        k = self._output_spec.top_k
        if k is None:
            return self._checked(name, found, rows)
        ids_name, values_name, tail_name = names.top_k_names(name)
        if ids_name not in found:
            whole = self._checked(name, found, rows)
            if self.spec.max_top_k:  # it sends an output whole if that is not a distribution over classes
                return whole
            # The server does not support top-k: do it here.
            return top_k(whole, min(k, whole.shape[-1]), self._output_spec.temperature)
        width = self.spec.outputs[name].shape[-1] if name in self.spec.outputs else -1
        return TopK(
            ids=self._checked(ids_name, found, rows),
            values=self._checked(values_name, found, rows),
            tail_lse=self._checked(tail_name, found, rows),
            temperature=self._output_spec.temperature,
            classes=width if width > 0 else None,
        )

    def _checked(self, name: str, found: dict[str, Array], rows: int) -> Array:
        array = found.get(name)
        if array is None:
            raise self.unusable(f"no output {name!r}, only {listed(found) or 'none'}")
        if array.ndim == 0 or array.shape[0] != rows:
            raise self.unusable(f"output {name!r} has shape {list(array.shape)} for {rows} rows{self.rows_hint(rows)}")
        spec = self.spec.outputs.get(name)
        if spec is not None and not spec.fits(array.shape[1:]):
            raise self.unusable(f"output {name!r} has rows of shape {list(array.shape[1:])}, not {list(spec.shape)}")
        if array.dtype.kind == "f":
            # `min` propagates NaN, and takes half the time of checking each value.
            if self._checks_nan and array.size and np.isnan(array.min()):
                row = int(np.argwhere(np.isnan(array))[0][0])
                raise self.unusable(f"output {name!r} is NaN in row {row} of {rows}")
            dtype = self._output_spec.dtype
            if dtype is not None and array.dtype != dtype and name not in self.spec.uncast_outputs:
                array = to_float16(array) if dtype == "float16" else array.astype(dtype)
        return array
