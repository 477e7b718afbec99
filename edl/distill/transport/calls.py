"""Calls a teacher's server: the channel, the methods of KServe v2, their errors, and the ids that both sides log.

Every error leaves here as `RequestFailed`, with a `RequestFailure` that the dispatcher understands.

gRPC decompresses messages before this program sees them, so a few hundred bytes could become gigabytes here. So
compression is off, and a channel accepts messages only up to the largest possible answer.

W3C Trace Context (https://www.w3.org/TR/trace-context/): `traceparent` is `00-TRACE-PARENT-FLAGS`, of 32, 16 and 2
hexadecimal digits. A request's id has 16 as well, so that it can stand for a span.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from google.protobuf.message import DecodeError

from edl.distill.dispatch.actions import FailureKind, RequestFailure
from edl.distill.options import Options
from edl.distill.transport.schema import ModelSpec
from edl.errors import ProtocolError, SettingsError
from edl.protocol import codec, kserve, names, tensors
from edl.protocol.channel import Metadata, aio_channel, call_metadata
from edl.protocol.tensors import Array
from edl.protocol.tls.credentials import CredentialFiles
from edl.protocol.transport import grpc

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # readers do not share connections, so they cannot break each other's
    ("grpc.enable_retries", 0),  # the dispatcher decides that
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # keepalive waits for gRPC's own pings, whose default is a minute
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


class RequestIds(Iterator[str]):
    """Ids of the requests over a connection: 8 random hexadecimal digits, and the request's number in 8 digits."""

    def __init__(self) -> None:
        self._prefix = f"{secrets.randbelow(2**32 - 1) + 1:08x}"  # not 0, which is no valid span
        self._numbers = itertools.count()
        # for a request without a span of the user's: the trace of this process, the parent this connection
        self.traceparent = f"00-{_trace_of(os.getpid())}-{self._prefix}00000000-00"

    def __next__(self) -> str:
        return f"{self._prefix}{next(self._numbers) & 0xFFFFFFFF:08x}"


@functools.lru_cache(maxsize=1)
def _trace_of(pid: int) -> str:
    """Return the id of the trace for requests of this process that belong to no other trace.

    A forked child has another.
    """
    return secrets.token_hex(16)


def current_traceparent() -> str:
    """Return the span of OpenTelemetry that is current in the calling thread; empty where there is none.

    A program without OpenTelemetry has not imported it, so it is not imported here.
    """
    get_current_span: Callable[[], object] | None = getattr(
        sys.modules.get("opentelemetry.trace"), "get_current_span", None
    )
    if get_current_span is None:
        return ""
    context = get_current_span().get_span_context()  # type: ignore[attr-defined]
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


_FIRST_ANSWER_NBYTES = 64 << 20
"""Largest answer that a channel accepts before the model is known. Most models need no larger one."""
HEADER_NBYTES = 64 << 10  # room for a request's names, shapes and options, which usually take a few hundred bytes
_METADATA_NBYTES = 4 << 20  # limit of answers about the server or its model: gRPC's own default for any message
_MARGIN = 4
"""How many times larger than the model's outputs an answer may be. Top-k labels of all classes take three times the
bytes of FP16 outputs (INT32 ids and FP32 values), and FP32 instead of FP16 takes twice."""
_BESIDE_NBYTES = 4 << 20  # room for headers
_MOST_OF_CHARACTER = 4  # bytes of a character in UTF-8
_METADATA = ("ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig", "RepositoryIndex")
_SHARED_MEMORY = ("SystemSharedMemoryRegister", "SystemSharedMemoryUnregister")


def max_answer_nbytes(spec: ModelSpec, limit: int) -> int:
    """Return the largest size in bytes of this model's answers, at the largest number of rows in a request.

    It is `limit` if the model's metadata leaves the size open, and never more.
    """
    row = 0.0
    for output in spec.outputs.values():
        try:
            dtype = tensors.dtype_of(output.datatype)
        except ProtocolError:  # an output that is not requested; otherwise the answers will show the error
            return limit
        if dtype.kind == "O" or -1 in output.shape:
            return limit
        shape = output.shape
        if spec.max_top_k and shape and shape[-1] > spec.max_top_k:  # sent as the top k alone
            shape = (*shape[:-1], spec.max_top_k)
        row += max(dtype.itemsize, 2) * math.prod(shape)
    if not spec.outputs or not spec.max_rows:
        return limit
    return int(min(_MARGIN * spec.max_rows * row + _BESIDE_NBYTES, limit))


def rows_that_fit(fields: Mapping[str, Array], spec: ModelSpec, nbytes: int) -> int:
    """Return how many rows like these fit a request of `nbytes`, in the model's types; at least 1."""
    total = rows = 0
    for name, array in fields.items():
        wanted = spec.inputs.get(name)
        if spec.inputs and wanted is None:
            continue
        rows = len(array)
        if array.dtype.kind == "O":
            total += sum(
                [4 + len(text) * (1 if isinstance(text, bytes) else _MOST_OF_CHARACTER) for text in array.flat]
            )
        elif wanted is not None and array.dtype.kind not in "SU":
            total += array.size * tensors.dtype_of(wanted.datatype).itemsize
        else:
            total += array.nbytes
    return max(nbytes * rows // total, 1) if total else nbytes


def _channel_options(nbytes: int) -> list[tuple[str, Any]]:
    few = {
        "name": [{"service": names.SERVICE, "method": method} for method in (*_METADATA, *_SHARED_MEMORY)],
        "maxResponseMessageBytes": min(nbytes, _METADATA_NBYTES),
    }
    return [
        ("grpc.max_receive_message_length", min(nbytes, 2**31 - 1)),
        ("grpc.service_config", json.dumps({"methodConfig": [few]})),
        ("grpc.service_config_disable_resolution", 1),
        # Announce no compression, which servers respect, and do not decompress messages of those that do not.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.per_message_decompression", 0),
    ]


_REJECTED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
}
_ACCESS_DENIED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
"""The teacher refuses any request of this student, so another teacher may answer it."""


_NOT_TAKEN_HERE = ("CLIENT: Received message larger than max", "Decompressed message larger", "Compression algorithm")
"""gRPC's local messages for an answer that it refuses. The status code alone could also have come from the teacher."""
_REMEDY = (
    "answers must not be compressed, nor be larger than the model's metadata say, where they say it, nor larger than "
    "Options(max_answer_bytes=...)"
)
_LONGEST_HINT_S = 60.0
"""Longest pause that a teacher may ask for. A full queue is processed sooner than this, or never."""


class RequestFailed(Exception):
    """Raised for a request, or an attempt to connect, that failed. `failure` says how."""

    def __init__(self, kind: FailureKind, message: str, retry_after_s: float = 0.0) -> None:
        self.failure = RequestFailure(kind, message, retry_after_s)
        super().__init__(self.failure.message)


class TeacherLacks(RequestFailed):
    """Raised for a teacher that answers but cannot serve this student, unless one of the two is changed."""

    def __init__(self, message: str) -> None:
        super().__init__(FailureKind.REJECTED, message)


def failure_from_status(
    code: grpc.StatusCode, details: str, retry_after_ms: str | bytes | int | None, endpoint: str
) -> RequestFailed:
    """Return the failure for a gRPC status; `retry_after_ms` is the teacher's hint, None without one."""
    message = f"{endpoint}: {details or code.name}"
    if any(words in details for words in _NOT_TAKEN_HERE):
        return RequestFailed(FailureKind.BAD_OUTPUT, f"{message}; {_REMEDY}")
    if retry_after_ms is not None and code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
        return RequestFailed(FailureKind.OVERLOADED, message, _hinted_s(retry_after_ms))
    if code is grpc.StatusCode.UNAVAILABLE:
        return RequestFailed(FailureKind.LOST, message)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" not in details:
        return RequestFailed(FailureKind.OVERLOADED, message)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RequestFailed(FailureKind.TIMEOUT, message)
    if code in _ACCESS_DENIED:
        return RequestFailed(
            FailureKind.LOST, f"{endpoint} refuses this student ({code.name}): {details or 'no words'}"
        )
    if code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.NOT_FOUND):
        # The model or the requested version is gone, which says nothing about the request.
        return RequestFailed(FailureKind.LOST, message)
    if code in _REJECTED or code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return RequestFailed(FailureKind.REJECTED, message)
    return RequestFailed(FailureKind.ERROR, message)


def _hinted_s(milliseconds: str | bytes | int) -> float:
    """Return the teacher's hint in seconds; 0 (no hint) for anything but a finite number above 0."""
    try:
        seconds = float(milliseconds) / 1000
    except (ValueError, OverflowError):
        return 0.0
    return min(seconds, _LONGEST_HINT_S) if math.isfinite(seconds) and seconds > 0 else 0.0


def failure_of_call(exc: grpc.aio.AioRpcError, endpoint: str, number: str = "") -> RequestFailed:
    """Return the failure for the error of a call."""
    hint = dict(exc.trailing_metadata() or ()).get(names.RETRY_AFTER_MS)
    details = exc.details() or exc.code().name
    return failure_from_status(exc.code(), f"{details} (request {number})" if number else details, hint, endpoint)


def compression_hint(data: codec.Buffer) -> str:
    """Return a hint for error messages if an answer does not parse because it is compressed; else an empty string."""
    compressed = codec.is_compressed(data)
    return " (it is compressed, which this student never asks for, and does not take)" if compressed else ""


class UnknownModel(RequestFailed):
    """Raised for a server that does not know the model, or its version."""


_RESTRICTED = "protocol is restricted"
"""Triton's message for a restricted method (`--grpc-restricted-protocol`), whose status code is UNAVAILABLE."""


class ServerCalls:
    """The channel to a server, and the methods of KServe v2 on it. Used on the event loop."""

    def __init__(
        self,
        endpoint: str,
        files: CredentialFiles | None = None,
        options: Options | None = None,
        authority: str = "",
    ) -> None:
        self.endpoint = endpoint
        self.options = options or Options()
        self.metadata: Metadata = ()  # sent with every call
        self._files = files
        self._authority = [("grpc.default_authority", authority)] if authority else []
        self._answer_nbytes = min(_FIRST_ANSWER_NBYTES, self.options.max_answer_bytes)
        self.channel = self._open_channel()

    def _open_channel(self) -> grpc.aio.Channel:
        options = [*_OPTIONS, *_channel_options(self._answer_nbytes), *self._authority]
        return aio_channel(self.endpoint, self._files, options)

    def authorize(self) -> None:
        """Send this student's token with every call from now on."""
        try:
            self.metadata = call_metadata(self.endpoint, self._files)
        except SettingsError as exc:
            raise TeacherLacks(str(exc)) from exc

    @property
    def answer_nbytes(self) -> int:
        """Bytes of the largest answer that is taken."""
        return self._answer_nbytes

    async def allow_answers(self, nbytes: int) -> bool:
        """Accept answers of up to `nbytes`; return whether this needed a new channel, whose limit is fixed."""
        if nbytes <= self._answer_nbytes:
            return False
        await self.channel.close()
        self._answer_nbytes = nbytes
        self.channel = self._open_channel()
        return True

    async def call(self, method: str, request: Any, deadline: float) -> Any:
        """Call a method by its name in KServe v2, with a deadline on the monotonic clock.

        Raises:
            RequestFailed: LOST if waiting may help.
            TeacherLacks: The server refuses the method to this student, or does not have it.
        """
        answer_type = getattr(kserve, f"{method}Response")
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(names.method(method))
        timeout_s = deadline - time.monotonic()
        try:
            data = await call(request.SerializeToString(), timeout=max(timeout_s, 0.001), metadata=self.metadata)
            return answer_type.FromString(data)
        except grpc.aio.AioRpcError as exc:
            # An exception kept in a local variable would be a cycle that keeps the channel's thread alive.
            if exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise RequestFailed(FailureKind.LOST, f"{self.endpoint} does not answer {method}") from exc
            raise self._refusal(method, exc) from exc
        except DecodeError as exc:
            what = f"{self.endpoint}: its answer to {method} is no message of KServe v2{compression_hint(data)}"
            raise RequestFailed(FailureKind.REJECTED, what) from exc

    async def open_channel(self, traceparent: str, deadline: float) -> dict[str, Any]:
        """Return what `names.OPEN_CHANNEL` answers.

        Raises:
            RequestFailed: The server refuses, or does not answer in time.
            ValueError: Its answer is not JSON.
        """
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(names.OPEN_CHANNEL)
        try:
            metadata = (*self.metadata, (names.TRACEPARENT, traceparent))
            data = await call(b"", timeout=max(deadline - time.monotonic(), 0.001), metadata=metadata)
        except grpc.aio.AioRpcError as exc:
            raise failure_of_call(exc, self.endpoint) from exc
        return dict(json.loads(data))

    def _refusal(self, method: str, exc: grpc.aio.AioRpcError) -> RequestFailed:
        """Return the error for a method that the server refuses; its type says whether waiting may help."""
        code, words = exc.code(), str(failure_of_call(exc, self.endpoint))
        remedy = ": name the model, Teachers(model=...)" if method == "RepositoryIndex" else ""
        if code is grpc.StatusCode.UNIMPLEMENTED:  # whose details, "Method not implemented!", name none
            what = f"{self.endpoint} does not implement {method}{remedy}"
            # A load balancer returns this, too, while it has no server.
            return RequestFailed(FailureKind.REJECTED, what) if method == "ServerReady" else TeacherLacks(what)
        if _RESTRICTED in (exc.details() or "") or (remedy and code is grpc.StatusCode.PERMISSION_DENIED):
            return TeacherLacks(f"{words} ({method}){remedy}")
        if code is grpc.StatusCode.UNAUTHENTICATED and (self._files is None or not self._files.settings.token_file):
            what = f"{words}: this student shows no token (EDL_TOKEN_FILE, token_file=, --token-file)"
            return TeacherLacks(f"{what}{remedy}")
        if code in _ACCESS_DENIED:  # REJECTED is logged as a warning; an unreachable teacher is not
            return RequestFailed(FailureKind.REJECTED, f"{words}{remedy}")
        if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
            return UnknownModel(FailureKind.REJECTED, words)
        return failure_of_call(exc, self.endpoint)
