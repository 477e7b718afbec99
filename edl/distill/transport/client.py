"""Connects to a teacher: KServe v2 over gRPC, shared memory on the same host.

Every error leaves here as `RequestFailed` with a `RequestFailure` that the dispatcher understands. What does not belong
here: retries, or any choice between teachers.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from edl.distill.compress import TopK, to_float16, top_k
from edl.distill.dispatch.actions import FailureKind, RequestFailure
from edl.distill.transport.calls import (
    ACCESS_DENIED,
    FIRST_ANSWER_NBYTES,
    HEADER_NBYTES,
    MESSAGE_LIMITS,
    MessageLimits,
    RequestFailed,
    RequestIds,
    TeacherLacks,
    channel_options,
    failure_from_status,
    max_answer_nbytes,
)
from edl.distill.transport.model_config import (
    LONGEST_NAME,
    MOST_DIGITS,
    LanguageModelConfig,
    config_number,
    count_instances,
)
from edl.distill.transport.request import Payload, request_header
from edl.distill.transport.schema import (
    ModelSpec,
    OutputSpec,
    Reply,
    RequestPriority,
    TensorMetadata,
    choose_priority,
    kserve_datatype,
)
from edl.distill.transport.shm import RegionNames, ShmRegistrations, is_about_memory
from edl.distill.transport.stream import InferStream, RawResponse, compression_hint
from edl.errors import ProtocolError, SettingsError
from edl.protocol import codec, kserve, names, tensors
from edl.protocol.channel import Metadata, aio_channel, call_metadata
from edl.protocol.tensors import Array
from edl.protocol.tls.credentials import CredentialFiles
from edl.protocol.transport import grpc
from edl.quoting import did_you_mean, listed, quote

__all__ = ["RequestFailed", "TeacherClient", "TeacherLacks"]

logger = logging.getLogger("edl.distill")

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # readers do not share, and so do not break, each other's connections
    ("grpc.enable_retries", 0),  # the dispatcher decides that
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # of gRPC's own pings, which keepalive waits behind: by default a minute
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

_PLACEHOLDER_ID = "-" * 16  # as long as a stream's, so that a call of its own is as large
_MOST_SPECS = 64
"""Headers of answers that are known by their bytes: requests of one shape have one; more would only hold memory."""
_FLOATING = ("FP16", "FP32", "FP64", "BF16")  # what `dtype` is about
_CONFIGURATION = "model_configuration"  # Triton's extension
_RESTRICTED = "protocol is restricted"
"""Triton's words for a method that is closed to others (`--grpc-restricted-protocol`); its code says UNAVAILABLE."""
_MOST_NAMES = 1000  # of a model's metadata; what no model has, and nobody could read
_SMALL_NBYTES = 4096  # bytes; no server refuses a message for that


class _UnknownModel(RequestFailed):
    """Raised for a server that does not know the model, or its version."""


class TeacherClient:
    """A connection to a teacher. All methods run on the event loop of the reader.

    Args:
        shared_memory: whether to use it if the teacher is on this host.
        files: certificates and tokens, None for neither.
    """

    def __init__(
        self,
        endpoint: str,
        output_spec: OutputSpec,
        *,
        shared_memory: bool = True,
        region_names: RegionNames | None = None,
        files: CredentialFiles | None = None,
        limits: MessageLimits = MESSAGE_LIMITS,
    ) -> None:
        self.endpoint = endpoint
        self.output_spec = output_spec
        self.spec = ModelSpec("", "", {}, {})
        self.shares_memory = shared_memory and _is_local(endpoint)
        self._files = files
        self._metadata: Metadata = ()
        self._limits = limits
        self._answer_nbytes = min(FIRST_ANSWER_NBYTES, limits.answer_bytes)
        self._connect()
        self._regions = ShmRegistrations(self._call_method, endpoint, region_names if region_names is not None else {})
        self._calls: set[grpc.aio.UnaryUnaryCall[bytes, bytes]] = set()
        self._retry_numbers = itertools.count()
        self._retries: dict[int, asyncio.Task[Reply]] = {}
        self._headers: dict[Any, bytes] = {}
        self._specs: dict[bytes, tuple[str, list[tuple[str, str, tuple[int, ...]]]]] = {}
        self._named_version = ""  # in requests: the one that is asked for, if the server lists any
        self._version_required = (
            False  # whether an answer that names no version may be of another one than was asked for
        )
        self._server_top_k = False
        self._server_checks_nan = False
        self._server_streams = False
        self._server_bundles = False
        self._server_fragments = False
        self._stream: InferStream | None = None
        self._ids = RequestIds()
        self._proven_nbytes = _SMALL_NBYTES
        self._max_batch = 0
        self._of_language = LanguageModelConfig()
        self._priority = RequestPriority()
        self._max_nbytes = limits.request_bytes
        self._closed = False

    @property
    def takes_bundles(self) -> bool:
        """Whether requests name shared memory, and several of them can go in a message."""
        return self.shares_memory and self._server_streams and self._server_bundles

    async def open(self, timeout_s: float) -> ModelSpec:
        """Connect, and see that the server is ready and what its model looks like.

        Raises:
            RequestFailed: LOST if it cannot be reached or is not ready.
            TeacherLacks: It has no such model, does not say which it has, or wants a token that this student lacks.
        """
        deadline = time.monotonic() + timeout_s
        try:
            self._metadata = call_metadata(self.endpoint, self._files)
        except SettingsError as exc:
            raise TeacherLacks(str(exc)) from exc
        spec = await self._discover_model(deadline)
        wanted = max_answer_nbytes(spec, self._limits)
        if wanted > self._answer_nbytes:  # which is said once for all of a channel, so there must be another one
            await self._channel.close()
            self._answer_nbytes = wanted
            self._connect()
            spec = await self._discover_model(deadline)
        if self.output_spec.version and not self._named_version:
            logger.warning(
                "%s does not say which version of model %r it has: its labels are taken for those of version %r, as "
                "version= names it",
                self.endpoint,
                spec.name,
                self.output_spec.version,
            )
        self.spec = spec
        return spec

    def _connect(self) -> None:
        options = [*_OPTIONS, *channel_options(self._answer_nbytes)]
        self._channel = aio_channel(self.endpoint, self._files, options)
        self._infer: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(
            names.method("ModelInfer")
        )

    async def _discover_model(self, deadline: float) -> ModelSpec:
        ready = await self._call_method("ServerReady", kserve.ServerReadyRequest(), deadline)
        if not ready.ready:
            raise RequestFailed(FailureKind.LOST, f"{self.endpoint} is not ready")
        server = await self._call_method("ServerMetadata", kserve.ServerMetadataRequest(), deadline)
        model = self.output_spec.model or await self._only_model(deadline)
        await self._check_model_ready(model, deadline)
        self.shares_memory = self.shares_memory and names.EXTENSION_SHARED_MEMORY in server.extensions
        self._server_top_k = names.EXTENSION_TOP_K in server.extensions
        self._server_streams = names.EXTENSION_STREAM in server.extensions
        self._server_bundles = names.EXTENSION_BUNDLE in server.extensions
        self._server_fragments = names.EXTENSION_FRAGMENT in server.extensions
        self._server_checks_nan = names.EXTENSION_NO_NAN in server.extensions
        config = await self._fetch_config(model, deadline) if _CONFIGURATION in server.extensions else None
        self._max_batch = self._max_rows(config) if config is not None else 0
        self._of_language = LanguageModelConfig()
        if config is not None and self._server_streams:
            self._of_language = LanguageModelConfig.of(config)
        self._priority = choose_priority(
            self.output_spec.priority,
            supported=names.EXTENSION_SCHEDULE_POLICY in server.extensions,
            levels=config.dynamic_batching.priority_levels if config is not None else 0,
            max_batch=self._max_batch,
            instances=count_instances(config) if config is not None else 0,
        )
        if self._server_streams:  # a teacher of ours, which is nobody else's
            self._priority = RequestPriority()
        if self._priority.warning:
            logger.warning("%s (model %r): %s", self.endpoint, model, self._priority.warning)
        return await self._spec(model, deadline)

    async def _check_model_ready(self, model: str, deadline: float) -> None:
        """Check that the server has the model, in the version that is asked for, and that it is ready.

        Raises:
            RequestFailed: LOST if it is not ready, REJECTED if the server lacks the version.
            TeacherLacks: The server has no such model.
        """
        try:
            versions = await self._list_versions(model, deadline) if self.output_spec.version else ()
            self._named_version = self.output_spec.version if versions else ""
            self._version_required = len(versions) > 1
            request = kserve.ModelReadyRequest(name=model, version=self._named_version)
            if (await self._call_method("ModelReady", request, deadline)).ready:
                return
            unknown = ""
        except _UnknownModel as exc:
            unknown = str(exc)
        # Triton says that a model is not ready also where it has no such model.
        try:
            index = await self._call_method("RepositoryIndex", kserve.RepositoryIndexRequest(), deadline)
        except RequestFailed:
            if unknown:
                raise TeacherLacks(unknown) from None
        else:
            known = sorted({found.name for found in index.models})
            if known and model not in known:  # a server without models may be loading the first of them
                has = f"no model {model!r}, only {listed(known)}{did_you_mean(model, known)}"
                raise TeacherLacks(f"{self.endpoint} has {has}")
        if unknown:
            raise RequestFailed(FailureKind.REJECTED, unknown)
        raise RequestFailed(FailureKind.LOST, f"model {model!r} of {self.endpoint} is not ready")

    async def check_ready(self, timeout_s: float) -> None:
        """Check that server and model are ready, as `open` does.

        Raises:
            RequestFailed: LOST if not.
        """
        deadline = time.monotonic() + timeout_s
        for method, request in (
            ("ServerReady", kserve.ServerReadyRequest()),
            ("ModelReady", kserve.ModelReadyRequest(name=self.spec.name, version=self._named_version)),
        ):
            if not (await self._call_method(method, request, deadline)).ready:
                raise RequestFailed(FailureKind.LOST, f"{self.endpoint} is not ready any more")

    async def fetch_spec(self, timeout_s: float) -> ModelSpec:
        """Ask for the model's present metadata.

        Raises:
            RequestFailed: as `open`.
        """
        return await self._spec(self.spec.name, time.monotonic() + timeout_s)

    def start(
        self, payload: Payload, timeout_s: float, done: Callable[[Reply | RequestFailure | None], None]
    ) -> Callable[[], None] | None:
        """Ask for the outputs of `payload` over the stream, without a task for it.

        `done`: called once, not before this returns, with what `infer` returns or why not; with None if
        cancelled.

        Returns:
            What cancels the request. None, without any effect, if the stream cannot take it: then `infer` can.
        """
        if not self._server_streams or self._is_lost:
            return None
        region: str | None = None
        if payload.slot is not None and self.shares_memory:
            region = self._regions.name_of(payload.slot.region)
            if region is None:
                return None
        header = self._header(payload, timeout_s, region)
        raw = payload.raw if region is None else ()
        if not self._fits_proven_size(header, raw):
            return None
        stream = self._open_stream()
        if region is None and not stream.cuts_request(header, raw):
            return functools.partial(
                stream.cancel,
                stream.start(header, raw, timeout_s, functools.partial(self._deliver, payload.rows, done)),
            )
        retry = next(self._retry_numbers)
        ended = functools.partial(
            self._request_ended, retry, payload, region, timeout_s, time.monotonic() + timeout_s, done
        )
        return functools.partial(self._cancel, retry, stream, stream.start(header, raw, timeout_s, ended))

    def _request_ended(
        self,
        retry: int,
        payload: Payload,
        region: str | None,
        timeout_s: float,
        deadline: float,
        done: Callable[[Reply | RequestFailure | None], None],
        answer: RawResponse | RequestFailure | None,
    ) -> None:
        """Deliver the answer to a request in shared memory or in fragments, or give it another chance."""
        if not isinstance(answer, RequestFailure) or not _may_succeed_otherwise(answer, region):
            self._deliver(payload.rows, done, answer)
            return
        task = asyncio.get_running_loop().create_task(self._infer_again(payload, region, answer, timeout_s, deadline))
        self._retries[retry] = task
        task.add_done_callback(functools.partial(self._retry_ended, retry, done))

    def _retry_ended(
        self, retry: int, done: Callable[[Reply | RequestFailure | None], None], task: asyncio.Task[Reply]
    ) -> None:
        del self._retries[retry]
        if task.cancelled():
            done(
                RequestFailure(FailureKind.LOST, f"{self.endpoint}: the connection was closed")
                if self._closed
                else None
            )
            return
        error = task.exception()
        if error is None:
            done(task.result())
        elif isinstance(error, RequestFailed):
            done(error.failure)
        else:
            logger.error("a request to %s failed in a way not foreseen", self.endpoint, exc_info=error)
            done(RequestFailure(FailureKind.ERROR, f"{self.endpoint}: {type(error).__name__}: {error}"))

    def _cancel(self, retry: int, stream: InferStream, number: str) -> None:
        if retry in self._retries:
            self._retries[retry].cancel()
        else:
            stream.cancel(number)

    def _deliver(
        self,
        rows: int,
        done: Callable[[Reply | RequestFailure | None], None],
        answer: RawResponse | RequestFailure | None,
    ) -> None:
        if isinstance(answer, tuple):
            try:
                reply = self._reply(answer, rows)
            except RequestFailed as exc:
                answer = self._with_request_id(exc.failure)
            except Exception as exc:
                # Whatever it was, the request has ended; it must not take the stream, and itself, along.
                logger.exception("an answer of %s was not understood, in a way not foreseen", self.endpoint)
                answer = RequestFailure(FailureKind.ERROR, f"{self.endpoint}: {type(exc).__name__}: {exc}")
            else:
                done(reply)
                return
        done(answer)

    def _with_request_id(self, failure: RequestFailure) -> RequestFailure:
        """Return the failure, with the id of the request whose answer has just come over the stream."""
        number = self._stream.answering if self._stream is not None else ""
        return replace(failure, message=f"{failure.message} (request {number})")

    async def infer(self, payload: Payload, timeout_s: float) -> Reply:
        """Ask for the outputs of `payload`.

        Returns:
            Their version, and arrays [rows, ...], read-only, or `TopK` where `output_spec.top_k` is set.

        Raises:
            RequestFailed: there is no usable answer.
        """
        if self._is_lost:
            raise RequestFailed(FailureKind.LOST, f"{self.endpoint}: the connection was lost while nobody asked")
        deadline = time.monotonic() + timeout_s
        region = await self._registered(payload, deadline)
        try:
            answer = await self._send(payload, region, timeout_s, deadline)
        except RequestFailed as exc:
            failure = exc.failure
            if region is None or not _may_succeed_otherwise(failure, region):
                raise  # also of a request in fragments, which `_send` has sent whole
        else:
            return self._reply(answer, payload.rows)
        return await self._infer_again(payload, region, failure, timeout_s, deadline)

    async def _infer_again(
        self, payload: Payload, region: str | None, failure: RequestFailure, timeout_s: float, deadline: float
    ) -> Reply:
        """Ask again for what failed in the shared memory `region`, which the teacher may have lost, or in fragments.

        In memory that is registered once more if that is what the teacher says; else, and after that, in the message.
        What failed in fragments is sent whole.
        """
        if region is None:
            return self._reply(await self._send_whole(payload, timeout_s, deadline), payload.rows)
        if payload.slot is not None and is_about_memory(failure, region):
            again = await self._regions.register_again(payload.slot.region, region, deadline)
            self.shares_memory = self.shares_memory and again is not None
            if again is not None:
                try:
                    return self._reply(await self._send(payload, again, timeout_s, deadline), payload.rows)
                except RequestFailed as exc:
                    if not _may_succeed_otherwise(exc.failure, again):
                        raise
        return self._reply(await self._send(payload, None, timeout_s, deadline), payload.rows)

    async def _send(self, payload: Payload, region: str | None, timeout_s: float, deadline: float) -> RawResponse:
        header = self._header(payload, timeout_s, region)
        raw = payload.raw if region is None else ()
        timeout_s = max(deadline - time.monotonic(), 0.001)
        if not self._server_streams or not self._fits_proven_size(header, raw):
            return await self._call(header, raw, timeout_s, payload.traceparent)
        stream = self._open_stream()
        is_cut = stream.cuts_request(header, raw)
        try:
            return await stream.infer(header, raw, timeout_s)
        except RequestFailed as exc:
            if not is_cut or exc.failure.kind is not FailureKind.REJECTED:
                raise
        return await self._send_whole(payload, timeout_s, deadline)

    async def _send_whole(self, payload: Payload, timeout_s: float, deadline: float) -> RawResponse:
        """Send a request that was refused in fragments as a call of its own.

        Behind a load balancer, or after a connection that gRPC made anew, the stream may lead to an older server than
        the one that announced fragments. If the request is taken now, no others go in fragments.
        """
        header = self._header(payload, timeout_s, None)
        left_s = max(deadline - time.monotonic(), 0.001)
        answer = await self._call(header, payload.raw, left_s, payload.traceparent)
        if self._server_fragments:
            logger.info(
                "%s refused a request in fragments, and took it whole: requests go to it whole from now on (servers of "
                "several releases behind one address?)",
                self.endpoint,
            )
        self._server_fragments = False
        if self._stream is not None:
            self._stream.in_fragments = False
        return answer

    async def _registered(self, payload: Payload, deadline: float) -> str | None:
        """Return the name under which the teacher knows the payload's shared memory; None to send it in the message."""
        if payload.slot is None or not self.shares_memory:
            return None
        name = await self._regions.register(payload.slot.region, deadline)
        self.shares_memory = self.shares_memory and name is not None
        return name

    async def close(self, *, unregister: bool = True) -> None:
        """Close the connection; requests under way end with LOST. May be called twice.

        Args:
            unregister: have the teacher let go of shared memory; not if another connection goes on using it.
        """
        if self._closed:
            return
        self._closed = True
        for task in self._retries.values():
            task.cancel()
        for call in list(self._calls):
            call.cancel()
        if unregister and self._channel.get_state() is grpc.ChannelConnectivity.READY:
            await self._regions.close()
        stream = self._stream
        self._stream = None
        if stream is not None:
            await stream.close()
        await self._channel.close()

    async def _list_versions(self, model: str, deadline: float) -> tuple[str, ...]:
        """Return the versions of a model that the server has; none if it lists none.

        Raises:
            RequestFailed: REJECTED if the version asked for is not among them.
        """
        meta = await self._call_method("ModelMetadata", kserve.ModelMetadataRequest(name=model), deadline)
        listed = tuple(meta.versions)
        if listed and self.output_spec.version not in listed:
            has = ", ".join(map(repr, listed))
            what = f"version {has} of model {model!r}, and version={self.output_spec.version!r} is asked for"
            raise RequestFailed(FailureKind.REJECTED, f"{self.endpoint} has {what}")
        return listed

    @property
    def _uncast_outputs(self) -> tuple[str, ...]:
        """Outputs that `dtype` is not about: the log-probabilities of tokens that were asked for."""
        asked = names.TARGETS in self._of_language.optional_inputs and names.TARGET_LOGPROBS in self.output_spec.outputs
        return (names.TARGET_LOGPROBS,) if asked else ()

    async def _spec(self, model: str, deadline: float) -> ModelSpec:
        request = kserve.ModelMetadataRequest(name=model, version=self._named_version)
        meta = await self._call_method("ModelMetadata", request, deadline)
        if meta.name and meta.name != model:
            what = f"{self.endpoint} describes model {quote(meta.name)} where {model!r} is asked for"
            raise RequestFailed(FailureKind.REJECTED, what)
        versions = tuple(meta.versions)
        self._check_names(*versions, *(tensor.name for tensor in (*meta.inputs, *meta.outputs)))
        version = _newest(versions)
        if self.output_spec.version:
            version = self.output_spec.version
            versions = (version,) if versions else ()
        elif versions == self.spec.versions and self.spec.version in versions:
            version = self.spec.version  # which need not be the newest, as answers said
        inputs = {tensor.name: _spec_of(tensor) for tensor in meta.inputs}
        outputs = {tensor.name: _spec_of(tensor) for tensor in meta.outputs}
        about = self._of_language
        if self._uncast_outputs:
            inputs[names.TARGETS] = TensorMetadata(names.TARGETS, "INT32", (-1,))
            outputs[names.TARGET_LOGPROBS] = TensorMetadata(names.TARGET_LOGPROBS, "FP32", (-1,))
        return ModelSpec(
            name=model,
            version=version,
            versions=versions,
            inputs=inputs,
            outputs=outputs,
            max_rows=min(filter(None, (self._max_batch, self._priority.max_rows)), default=0),
            max_in_flight=self._priority.max_in_flight,
            max_nbytes=self._max_nbytes,
            sequences=about.sequences,
            max_top_k=about.max_top_k,
            max_sequence=about.max_sequence,
            tokenizer=about.tokenizer,
            weights_version=about.weights_version,
        )

    def _check_names(self, *found: str) -> None:
        """Check that what goes into logs, labels and caches' names is text that a person could have meant."""
        if len(found) > _MOST_NAMES:
            what = f"{self.endpoint}: its model has {len(found)} inputs and outputs, more than {_MOST_NAMES}"
            raise RequestFailed(FailureKind.REJECTED, what)
        for name in found:
            if len(name) > LONGEST_NAME or not name.isprintable():
                what = f"{self.endpoint}: its model's metadata has {quote(name)} in it, which is no name and no version"
                raise RequestFailed(FailureKind.REJECTED, what)

    # Requests

    @property
    def _is_lost(self) -> bool:
        """Whether the stream has ended: another server may answer at this address now, and know no region of ours."""
        return self._stream is not None and self._stream.broken and not self._stream.refused

    def _open_stream(self) -> InferStream:
        if self._stream is None or self._stream.refused:
            self._stream = InferStream(
                self._channel,
                self.endpoint,
                in_bundles=self._server_bundles,
                in_fragments=self._server_fragments,
                metadata=self._metadata,
                ids=self._ids,
            )
        return self._stream

    def _fits_proven_size(self, header: bytes, raw: Sequence[codec.Buffer]) -> bool:
        """Return whether the server takes messages of this size. A refused message would end the whole stream."""
        return _nbytes(header, raw) <= self._proven_nbytes

    async def _call(
        self, header: bytes, raw: Sequence[codec.Buffer], timeout_s: float, traceparent: str
    ) -> RawResponse:
        number = next(self._ids)
        # Our own server knows a request's header again, if nothing in it is new.
        request_id = _PLACEHOLDER_ID if self._server_streams else number
        own = ((names.REQUEST_ID, number), (names.TRACEPARENT, traceparent or self._ids.traceparent))
        message = codec.join_request(header + codec.id_field(request_id), raw)
        call = self._infer(message, timeout=timeout_s, metadata=(*self._metadata, *own))
        del message
        self._calls.add(call)
        try:
            answer = await call
        except grpc.aio.AioRpcError as exc:
            raise _translated(exc, self.endpoint, number) from exc
        finally:
            self._calls.discard(call)
        self._proven_nbytes = max(self._proven_nbytes, _nbytes(header, raw))
        try:
            found, parts, answered_id = codec.split_identified_response(answer)
        except ProtocolError as exc:
            raise RequestFailed(FailureKind.BAD_OUTPUT, f"{self.endpoint}: {exc}{compression_hint(answer)}") from exc
        if answered_id and answered_id != request_id:
            raise self._unusable(f"its answer is to request {quote(answered_id)}, and {request_id!r} was asked")
        return found, parts

    def _header(self, payload: Payload, timeout_s: float, region: str | None) -> bytes:
        key: Any = (payload.inputs, timeout_s, payload.traceparent)
        if region is not None and payload.slot is not None:
            key = (payload.inputs, timeout_s, payload.traceparent, region, payload.slot.offset)
        header = self._headers.get(key)
        if header is None:
            if len(self._headers) > 1024:
                self._headers.clear()
            header = request_header(
                self.output_spec,
                self.spec.name,
                payload,
                compressed=self._server_top_k,
                region=region,
                version=self._named_version,
                priority=self._priority.level,
            )
            if self._server_streams:
                header += _parameters(timeout_s, payload.traceparent)
            self._headers[key] = header
        return header

    async def _only_model(self, deadline: float) -> str:
        index = await self._call_method("RepositoryIndex", kserve.RepositoryIndexRequest(ready=True), deadline)
        found = sorted({model.name for model in index.models})
        if len(found) != 1:
            has = f"serves {listed(found)}" if found else "serves no model"
            # A server without models may be loading the first of them.
            error = TeacherLacks if found else functools.partial(RequestFailed, FailureKind.REJECTED)
            raise error(f"{self.endpoint} {has}: say which one with model=")
        return str(found[0])

    async def _fetch_config(self, model: str, deadline: float) -> kserve.ModelConfig | None:
        """Return a model's configuration, None if the server does not tell it."""
        try:
            answer = await self._call_method("ModelConfig", kserve.ModelConfigRequest(name=model), deadline)
        except RequestFailed as exc:
            if exc.failure.kind is FailureKind.LOST:
                raise
            logger.info("%s does not tell the configuration of model %r: %s", self.endpoint, model, exc)
            return None
        config: kserve.ModelConfig = answer.config
        return config

    def _max_rows(self, config: kserve.ModelConfig) -> int:
        """Return the rows of a request that the server takes, 0 if it does not say."""
        if not self._server_streams:
            return max(int(config.max_batch_size), 0)
        nbytes = config_number(config, names.MAX_BYTES)
        if nbytes:
            room = nbytes - min(HEADER_NBYTES, nbytes // 2)
            self._max_nbytes = min(room, self._limits.request_bytes)
        return config_number(config, names.MAX_ROWS)

    async def _call_method(self, method: str, request: Any, deadline: float) -> Any:
        answer_type = getattr(kserve, f"{method}Response")
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(names.method(method))
        timeout_s = deadline - time.monotonic()
        try:
            data = await call(request.SerializeToString(), timeout=max(timeout_s, 0.001), metadata=self._metadata)
            return answer_type.FromString(data)
        except grpc.aio.AioRpcError as exc:
            # An exception kept in a local variable would be a cycle that keeps the channel's thread alive.
            if exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise RequestFailed(FailureKind.LOST, f"{self.endpoint} does not answer {method}") from exc
            raise self._refusal(method, exc) from exc
        except DecodeError as exc:
            what = f"{self.endpoint}: its answer to {method} is no message of KServe v2{compression_hint(data)}"
            raise RequestFailed(FailureKind.REJECTED, what) from exc

    def _refusal(self, method: str, exc: grpc.aio.AioRpcError) -> RequestFailed:
        """Return the error for a method that the server refuses: whether waiting may help, and what to do."""
        code, words = exc.code(), str(_translated(exc, self.endpoint))
        remedy = ": name the model, Teachers(model=...)" if method == "RepositoryIndex" else ""
        if code is grpc.StatusCode.UNIMPLEMENTED:  # whose details, "Method not implemented!", name none
            what = f"{self.endpoint} does not implement {method}{remedy}"
            # A load balancer says that, too, while no server is behind it.
            return RequestFailed(FailureKind.REJECTED, what) if method == "ServerReady" else TeacherLacks(what)
        if _RESTRICTED in (exc.details() or "") or (remedy and code is grpc.StatusCode.PERMISSION_DENIED):
            return TeacherLacks(f"{words} ({method}){remedy}")
        if code is grpc.StatusCode.UNAUTHENTICATED and (self._files is None or not self._files.settings.token_file):
            what = f"{words}: this student shows no token (EDL_TOKEN_FILE, token_file=, --token-file)"
            return TeacherLacks(f"{what}{remedy}")
        if code in ACCESS_DENIED:  # said aloud, where a teacher that is merely away is not
            return RequestFailed(FailureKind.REJECTED, f"{words}{remedy}")
        if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
            return _UnknownModel(FailureKind.REJECTED, words)
        return _translated(exc, self.endpoint)

    # Answers

    def _reply(self, answer: RawResponse, rows: int) -> Reply:
        try:
            version, arrays = self._arrays(*answer)
            return Reply({name: self._output(name, arrays, rows) for name in self.output_spec.outputs}, version)
        except (ProtocolError, SettingsError) as exc:  # SettingsError: arrays that are no top-k labels
            raise RequestFailed(FailureKind.BAD_OUTPUT, f"{self.endpoint}: {exc}") from exc

    def _arrays(self, header: bytes, raw: list[memoryview]) -> tuple[str, dict[str, Array]]:
        """Return the version that an answer is of, and its arrays."""
        known = self._specs.get(header)
        if known is None:
            message = codec.parse_response(header)
            self._check_model(message.model_name)
            version = self._version(message.model_version)
            self._check_outputs(message.outputs)
            if not raw:
                return version, {
                    tensor.name: tensors.from_contents(tensor.datatype, tensor.shape, tensor.contents)
                    for tensor in message.outputs
                }
            specs = [(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in message.outputs]
            if len(self._specs) >= _MOST_SPECS or len(header) > _SMALL_NBYTES:
                self._specs.clear()
            known = self._specs[header] = version, specs  # answers to requests of one shape have one header
        version, specs = known
        if version and version != self.spec.version:
            self._version(version)  # a server that went back to a version that it had before
        if len(raw) != len(specs):
            raise ProtocolError(f"{len(specs)} outputs with {len(raw)} raw contents")
        return version, {
            name: tensors.from_raw(datatype, shape, data)
            for (name, datatype, shape), data in zip(specs, raw, strict=True)
        }

    def _check_model(self, named: str) -> None:
        """Check that an answer is of the model that is asked for; some servers do not say."""
        if not named or named == self.spec.name:
            return
        what = f"it answers for model {quote(named)}, and {self.spec.name!r} is asked for"
        if self._server_streams:  # another server has taken the address: a new connection tells what it has
            raise RequestFailed(FailureKind.LOST, f"{self.endpoint}: {what}")
        raise self._unusable(what)

    def _check_outputs(self, outputs: Iterable[kserve.ModelInferResponse.InferOutputTensor]) -> None:
        """Check that outputs differ in name, and are of the types that the model's metadata say."""
        found: set[str] = set()
        for tensor in outputs:
            if tensor.name in found:
                raise self._unusable(f"output {quote(tensor.name)} is in its answer twice")
            found.add(tensor.name)
            spec = self.spec.outputs.get(tensor.name)
            if spec is not None and spec.datatype and tensor.datatype not in self._datatypes(spec.datatype):
                raise self._unusable(f"output {tensor.name!r} is {quote(tensor.datatype)}, not {spec.datatype!r}")

    def _datatypes(self, described: str) -> tuple[str, ...]:
        """Return the datatypes that an output may have whose metadata say `described`: `dtype` asks for another."""
        if self.output_spec.dtype is None or described not in _FLOATING:
            return (described,)
        return described, kserve_datatype(self.output_spec.dtype)

    def _version(self, named: str) -> str:
        """Return the version that an answer is of, by the version that it names; empty if that cannot be known.

        gRPC connects again by itself, perhaps to a server that took the address of the former; and a foreign server may
        load another version while it serves, or have several. Our own say the same here as in their metadata.
        """
        expected = self.spec.version
        unnamed = not named and not self.spec.versions and bool(self.output_spec.version)  # `version=` stands for it
        if self._server_streams and named != expected and not unnamed:
            what = f"{self.endpoint} has version {named!r} of its model now, and had {expected!r}"
            raise RequestFailed(FailureKind.LOST, what)
        if self.output_spec.version:
            if named != expected and (named or self._version_required):
                what = f"it answers with version {named!r}" if named else "its answer names no version, of several"
                raise self._unusable(f"{what}, and version={expected!r} is asked for")
            return expected
        if not named:
            return expected if len(self.spec.versions) == 1 else ""
        if named != expected:
            if len(named) > LONGEST_NAME or not named.isprintable():
                raise self._unusable(f"it answers with version {quote(named)}, which is none")
            self.spec = replace(self.spec, version=named)
        return named

    def _output(self, name: str, found: dict[str, Array], rows: int) -> Array | TopK:
        if self.output_spec.top_k is None:
            return self._checked(name, found, rows)
        ids_name, values_name, tail_name = names.top_k_names(name)
        if ids_name not in found:
            whole = self._checked(name, found, rows)
            if self.spec.max_top_k:  # which sends whole what is no distribution over classes
                return whole
            # The server knows nothing of top-k: do it here.
            return top_k(whole, min(self.output_spec.top_k, whole.shape[-1]), self.output_spec.temperature)
        width = self.spec.outputs[name].shape[-1] if name in self.spec.outputs else -1
        return TopK(
            ids=self._checked(ids_name, found, rows),
            values=self._checked(values_name, found, rows),
            tail_lse=self._checked(tail_name, found, rows),
            temperature=self.output_spec.temperature,
            classes=width if width > 0 else None,
        )

    def _checked(self, name: str, found: dict[str, Array], rows: int) -> Array:
        array = found.get(name)
        if array is None:
            has = listed(found) or "none"
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
            dtype = self.output_spec.dtype
            if dtype is not None and array.dtype != dtype and name not in self._uncast_outputs:
                array = to_float16(array) if dtype == "float16" else array.astype(dtype)
        return array

    def _unusable(self, what: str) -> RequestFailed:
        return RequestFailed(FailureKind.BAD_OUTPUT, f"{self.endpoint} (model {self.spec.name!r}): {what}")


def _may_succeed_otherwise(failure: RequestFailure, region: str | None) -> bool:
    """Return whether what failed in shared memory, or in fragments, may succeed otherwise: it was refused."""
    return failure.kind is FailureKind.REJECTED or (region is not None and is_about_memory(failure, region))


def _is_local(endpoint: str) -> bool:
    host = endpoint.rpartition(":")[0].strip("[]")
    return endpoint.startswith("unix:") or host in ("localhost", "::1") or host.startswith("127.")


def _nbytes(header: bytes, raw: Sequence[codec.Buffer]) -> int:
    return len(header) + sum([memoryview(part).nbytes for part in raw])


def _parameters(timeout_s: float, traceparent: str) -> bytes:
    """Protobuf messages add up when their bytes are joined."""
    message = kserve.ModelInferRequest()
    message.parameters[names.TIMEOUT_MS].int64_param = round(timeout_s * 1000)
    if traceparent:
        message.parameters[names.TRACEPARENT].string_param = traceparent
    return bytes(message.SerializeToString())


def _newest(versions: Sequence[str]) -> str:
    """Return the version that a server answers with if it is not told which.

    Triton takes the highest number. Elsewhere a version is any text.
    """
    numbers = all(version.isdecimal() and len(version) <= MOST_DIGITS for version in versions)
    return max(versions, key=int) if versions and numbers else (versions or ("",))[-1]


def _spec_of(tensor: Any) -> TensorMetadata:
    return TensorMetadata(tensor.name, tensor.datatype, tuple(tensor.shape)[1:])


def _translated(exc: grpc.aio.AioRpcError, endpoint: str, number: str = "") -> RequestFailed:
    hint = dict(exc.trailing_metadata() or ()).get(names.RETRY_AFTER_MS)
    details = exc.details() or exc.code().name
    return failure_from_status(exc.code(), f"{details} (request {number})" if number else details, hint, endpoint)
