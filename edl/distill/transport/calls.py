"""Calls a teacher's server over gRPC, and inspects the server and its model before the first request.

A server's answers are not trusted. gRPC decompresses messages before this program sees them, so a message of a few
hundred bytes could become gigabytes. Compression is therefore off, and a channel accepts no message larger than
`Options.max_answer_bytes`.

W3C Trace Context (https://www.w3.org/TR/trace-context/): `traceparent` is `00-TRACE-PARENT-FLAGS`, in which the three
parts have 32, 16 and 2 hexadecimal digits. A request's id also has 16 digits, so that it can be used as a span id.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from google.protobuf.message import DecodeError

from edl.distill.dispatch.actions import FailureKind, RequestFailure
from edl.distill.options import Options
from edl.distill.transport.schema import NO_BATCH_REMEDY, ModelSpec, OutputSpec, TensorMetadata, choose_priority
from edl.errors import SettingsError
from edl.protocol import codec, kserve, names, tensors
from edl.protocol.channel import Metadata, aio_channel, call_metadata
from edl.protocol.tensors import Array
from edl.protocol.tls import CredentialFiles
from edl.protocol.transport import grpc
from edl.quoting import did_you_mean, listed, quote

logger = logging.getLogger("edl.distill")

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # readers do not share connections, so they cannot break each other's
    ("grpc.enable_retries", 0),  # the dispatcher decides about retries
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # keepalive waits for gRPC's own pings, whose default is a minute
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


class RequestIds(Iterator[str]):
    """Ids of a connection's requests: 8 random hexadecimal digits, and the request's number in 8 digits."""

    def __init__(self) -> None:
        self._prefix = f"{secrets.randbelow(2**32 - 1) + 1:08x}"  # not 0, which is not a valid span
        self._numbers = itertools.count()
        # for a request without a user's span: this process's trace, with this connection as the parent
        self.traceparent = f"00-{_trace_of(os.getpid())}-{self._prefix}00000000-00"

    def __next__(self) -> str:
        return f"{self._prefix}{next(self._numbers) & 0xFFFFFFFF:08x}"


@functools.lru_cache(maxsize=1)
def _trace_of(pid: int) -> str:
    """Return this process's trace id, for requests outside any other trace. A forked child gets its own trace id."""
    return secrets.token_hex(16)


def current_traceparent() -> str:
    """Return the traceparent of the thread's OpenTelemetry span; empty without a span or an imported OpenTelemetry."""
    get_current_span: Callable[[], object] | None = getattr(
        sys.modules.get("opentelemetry.trace"), "get_current_span", None
    )
    if get_current_span is None:
        return ""
    context = get_current_span().get_span_context()  # type: ignore[attr-defined]
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


HEADER_NBYTES = 64 << 10  # room for a request's names, shapes and options, which usually take a few hundred bytes
_METADATA_NBYTES = 4 << 20  # limit of answers about the server or its model: gRPC's own default for any message
_MOST_OF_CHARACTER = 4  # bytes of a character in UTF-8


def rows_that_fit(fields: Mapping[str, Array], spec: ModelSpec, nbytes: int) -> int:
    """Return how many rows like these fit in `nbytes` of a request, in the model's types; at least 1."""
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
    any_method = {"service": names.SERVICE}  # except named methods
    limits = ((any_method, min(nbytes, _METADATA_NBYTES)), (any_method | {"method": "ModelInfer"}, nbytes))
    methods = [{"name": [name], "maxResponseMessageBytes": most} for name, most in limits]
    return [
        ("grpc.max_receive_message_length", min(nbytes, 2**31 - 1)),
        ("grpc.service_config", json.dumps({"methodConfig": methods})),
        ("grpc.service_config_disable_resolution", 1),
        # Announce no compression, which most servers respect, and do not decompress messages of those that ignore it.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.per_message_decompression", 0),
    ]


_KINDS = {
    grpc.StatusCode.UNAVAILABLE: FailureKind.LOST,
    grpc.StatusCode.CANCELLED: FailureKind.LOST,
    grpc.StatusCode.NOT_FOUND: FailureKind.LOST,  # the model or the version is gone, which is not the request's fault
    grpc.StatusCode.UNAUTHENTICATED: FailureKind.LOST,
    grpc.StatusCode.PERMISSION_DENIED: FailureKind.LOST,
    grpc.StatusCode.RESOURCE_EXHAUSTED: FailureKind.OVERLOADED,
    grpc.StatusCode.DEADLINE_EXCEEDED: FailureKind.TIMEOUT,
    grpc.StatusCode.INVALID_ARGUMENT: FailureKind.REJECTED,
    grpc.StatusCode.UNIMPLEMENTED: FailureKind.REJECTED,
    grpc.StatusCode.FAILED_PRECONDITION: FailureKind.REJECTED,
    grpc.StatusCode.OUT_OF_RANGE: FailureKind.REJECTED,
}
"""The kind of failure for each status; `FailureKind.ERROR` for any other."""
# The teacher refuses every request of this student; a different teacher may answer.
_ACCESS_DENIED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}


_NOT_TAKEN_HERE = ("CLIENT: Received message larger than max", "Decompressed message larger", "Compression algorithm")
"""Messages of the local gRPC library when it refuses an answer. The status code alone could also come from the
teacher."""
_REMEDY = "answers must be uncompressed and not larger than Options(max_answer_bytes=...)"
_LONGEST_HINT_S = 60.0  # longest pause that a teacher may request; a full queue is processed sooner, or never


class RequestFailed(Exception):
    """Raised if a request or an attempt to connect fails."""

    def __init__(self, kind: FailureKind, message: str, retry_after_s: float = 0.0) -> None:
        self.failure = RequestFailure(kind, message, retry_after_s)
        super().__init__(self.failure.message)


class TeacherLacks(RequestFailed):
    """Raised if a teacher answers, but cannot serve this student unless the teacher or the student is changed."""

    def __init__(self, message: str) -> None:
        super().__init__(FailureKind.REJECTED, message)


def failure_from_status(
    code: grpc.StatusCode, details: str, retry_after_ms: str | bytes | int | None, endpoint: str
) -> RequestFailed:
    """Return the failure for a gRPC status; `retry_after_ms` is the teacher's hint, None if there is none."""
    message, kind = f"{endpoint}: {details or code.name}", _KINDS.get(code, FailureKind.ERROR)
    if any(words in details for words in _NOT_TAKEN_HERE):
        return RequestFailed(FailureKind.BAD_OUTPUT, f"{message}; {_REMEDY}")
    if retry_after_ms is not None and code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
        return RequestFailed(FailureKind.OVERLOADED, message, _hinted_s(retry_after_ms))
    if kind is FailureKind.OVERLOADED and "larger than max" in details:  # a request refused by the teacher's gRPC
        kind = FailureKind.REJECTED
    if code in _ACCESS_DENIED:
        message = f"{endpoint} refuses this student ({code.name}): {details or 'no details'}"
    return RequestFailed(kind, message)


def _hinted_s(milliseconds: str | bytes | int) -> float:
    """Return the teacher's hint in seconds; 0 (no hint) for anything but a finite number above 0."""
    try:
        seconds = float(milliseconds) / 1000
    except (ValueError, OverflowError):
        return 0.0
    return min(seconds, _LONGEST_HINT_S) if math.isfinite(seconds) and seconds > 0 else 0.0


def failure_of_call(exc: grpc.aio.AioRpcError, endpoint: str, number: str = "") -> RequestFailed:
    """Return the failure for an error that a call raised."""
    hint = dict(exc.trailing_metadata() or ()).get(names.RETRY_AFTER_MS)
    details = exc.details() or exc.code().name
    return failure_from_status(exc.code(), f"{details} (request {number})" if number else details, hint, endpoint)


def compression_hint(data: codec.Buffer) -> str:
    """Return a hint for error messages if an answer does not parse because it is compressed; else an empty string."""
    compressed = codec.is_compressed(data)
    return " (it is compressed, which this student neither requests nor accepts)" if compressed else ""


class UnknownModel(RequestFailed):
    """Raised if a server does not know the model or the version."""


_RESTRICTED = "protocol is restricted"  # Triton, with `--grpc-restricted-protocol`; the status code is UNAVAILABLE


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
        named = [("grpc.default_authority", authority)] if authority else []
        channel_options = [*_OPTIONS, *_channel_options(self.options.max_answer_bytes), *named]
        self.channel = aio_channel(endpoint, files, channel_options)

    def authorize(self) -> None:
        """Send this student's token with every call from now on."""
        try:
            self.metadata = call_metadata(self.endpoint, self._files)
        except SettingsError as exc:
            raise TeacherLacks(str(exc)) from exc

    async def call(self, method: str, request: Any, deadline: float) -> Any:
        """Call a KServe v2 method by name, with a deadline on the monotonic clock; see `_refusal` for errors."""
        answer_type = getattr(kserve, f"{method}Response")
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(names.method(method))
        timeout_s = deadline - time.monotonic()
        try:
            data = await call(request.SerializeToString(), timeout=max(timeout_s, 0.001), metadata=self.metadata)
            return answer_type.FromString(data)
        except grpc.aio.AioRpcError as exc:
            # An exception kept in a local variable would be a cycle that keeps the channel's thread alive.
            if exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise RequestFailed(FailureKind.LOST, f"{self.endpoint} did not answer {method} in time") from exc
            raise self._refusal(method, exc) from exc
        except DecodeError as exc:
            what = f"{self.endpoint}: its answer to {method} is not a message of KServe v2{compression_hint(data)}"
            raise RequestFailed(FailureKind.REJECTED, what) from exc

    async def open_channel(self, traceparent: str, deadline: float) -> dict[str, Any]:
        """Return the answer to `names.OPEN_CHANNEL`. Raises `RequestFailed`, or ValueError if it is not JSON."""
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(names.OPEN_CHANNEL)
        try:
            metadata = (*self.metadata, (names.TRACEPARENT, traceparent))
            data = await call(b"", timeout=max(deadline - time.monotonic(), 0.001), metadata=metadata)
        except grpc.aio.AioRpcError as exc:
            raise failure_of_call(exc, self.endpoint) from exc
        return dict(json.loads(data))

    def _refusal(self, method: str, exc: grpc.aio.AioRpcError) -> RequestFailed:
        """Return the error for a call that the server refused: `TeacherLacks` if waiting cannot help."""
        code, words = exc.code(), str(failure_of_call(exc, self.endpoint))
        remedy = ": name the model, Teachers(model=...)" if method == "RepositoryIndex" else ""
        if code is grpc.StatusCode.UNIMPLEMENTED:  # whose details, "Method not implemented!", do not name the method
            what = f"{self.endpoint} does not implement {method}{remedy}"
            # A load balancer also returns this while it has no server.
            return RequestFailed(FailureKind.REJECTED, what) if method == "ServerReady" else TeacherLacks(what)
        if _RESTRICTED in (exc.details() or "") or (remedy and code is grpc.StatusCode.PERMISSION_DENIED):
            return TeacherLacks(f"{words} ({method}){remedy}")
        if code is grpc.StatusCode.UNAUTHENTICATED and (self._files is None or not self._files.settings.token_file):
            what = f"{words}: this student sends no token (EDL_TOKEN_FILE, token_file=, --token-file)"
            return TeacherLacks(f"{what}{remedy}")
        if code in _ACCESS_DENIED:  # REJECTED is logged as a warning; an unreachable teacher is not
            return RequestFailed(FailureKind.REJECTED, f"{words}{remedy}")
        if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
            return UnknownModel(FailureKind.REJECTED, words)
        return failure_of_call(exc, self.endpoint)


_CONFIGURATION = "model_configuration"  # Triton's extension
_LONGEST_NAME = 512  # of a model, tensor or version; longer text is not a name
_MOST_DIGITS = 18  # of a number in text that fits 64 bits; Python refuses thousands of digits
_MOST_NAMES = 1000  # in a model's metadata: more than any model has, or a person can read


async def probe_model(calls: ServerCalls, output_spec: OutputSpec, deadline: float) -> ModelSpec:
    """Return the specification of the server and the requested model.

    Raises:
        RequestFailed: LOST if the server cannot be reached or is not ready, REJECTED if it lacks the version.
        TeacherLacks: The server lacks the model, does not list its models, or requires a token that this student lacks.
    """
    ready = await calls.call("ServerReady", kserve.ServerReadyRequest(), deadline)
    if not ready.ready:
        raise RequestFailed(FailureKind.LOST, f"{calls.endpoint} is not ready")
    metadata = await calls.call("ServerMetadata", kserve.ServerMetadataRequest(), deadline)
    model = output_spec.model or await _only_model(calls, deadline)
    versions = await _check_model_ready(calls, model, output_spec.version, deadline)
    spec = ModelSpec(
        model,
        "",
        {},
        {},
        max_nbytes=calls.options.max_request_bytes,
        extensions=frozenset(metadata.extensions),
        named_version=output_spec.version if versions else "",
        version_required=len(versions) > 1,
    )
    config = await _fetch_config(calls, model, deadline) if _CONFIGURATION in spec.extensions else None
    if spec.is_edl:  # an EDL teacher has no other clients, so requests have no priority
        spec = _with_own_config(spec, config, output_spec) if config is not None else spec
    else:
        spec, warning = _with_priority(spec, config, output_spec)
        if warning:
            logger.warning("%s (model %r): %s", calls.endpoint, model, warning)
    return await fetch_spec(calls, output_spec, spec, deadline)


def _with_own_config(spec: ModelSpec, config: kserve.ModelConfig, output_spec: OutputSpec) -> ModelSpec:
    nbytes = _number(config, names.MAX_BYTES)
    nbytes -= min(HEADER_NBYTES, nbytes // 2)
    takes_targets = names.TARGETS in _text(config, names.OPTIONAL_INPUTS).split(",")
    has_targets = takes_targets and names.TARGET_LOGPROBS in output_spec.outputs
    return replace(
        spec,
        max_rows=_number(config, names.MAX_ROWS),
        max_nbytes=min(nbytes or spec.max_nbytes, spec.max_nbytes),
        sequences=_text(config, names.SEQUENCES),
        max_top_k=_number(config, names.MAX_TOP_K),
        max_sequence=_number(config, names.MAX_SEQUENCE),
        tokenizer=_text(config, names.TOKENIZER),
        weights_version=_text(config, names.WEIGHTS_VERSION),
        uncast_outputs=(names.TARGET_LOGPROBS,) if has_targets else (),
    )


def _with_priority(
    spec: ModelSpec, config: kserve.ModelConfig | None, output_spec: OutputSpec
) -> tuple[ModelSpec, str]:
    """Return the specification completed with a foreign server's batch limits and priority, and a warning or ""."""
    config = kserve.ModelConfig() if config is None else config
    max_batch = max(int(config.max_batch_size), 0)
    priority = choose_priority(
        output_spec.priority,
        supported=names.EXTENSION_SCHEDULE_POLICY in spec.extensions,
        levels=config.dynamic_batching.priority_levels,
        max_batch=max_batch,
        instances=sum(max(group.count, 0) * max(len(group.gpus), 1) for group in config.instance_group),
    )
    max_rows = min(filter(None, (max_batch, priority.max_rows)), default=0)
    spec = replace(spec, max_rows=max_rows, max_in_flight=priority.max_in_flight, priority=priority.level)
    return spec, priority.warning


async def fetch_spec(calls: ServerCalls, output_spec: OutputSpec, known: ModelSpec, deadline: float) -> ModelSpec:
    """Return the model with current metadata. `known` is the previous specification, with the latest version."""
    request = kserve.ModelMetadataRequest(name=known.name, version=known.named_version)
    meta = await calls.call("ModelMetadata", request, deadline)
    if meta.name and meta.name != known.name:
        what = f"{calls.endpoint} describes model {quote(meta.name)}, but {known.name!r} is requested"
        raise RequestFailed(FailureKind.REJECTED, what)
    versions = tuple(meta.versions)
    _check_names(calls.endpoint, *versions, *(tensor.name for tensor in (*meta.inputs, *meta.outputs)))
    version = _newest(versions)
    if output_spec.version:
        version = output_spec.version
        versions = (version,) if versions else ()
    elif versions == known.versions and (known.version in versions or not versions):
        version = known.version  # as named by answers: perhaps not the newest, or of a server that lists none
    wanted = [tensor for tensor in meta.outputs if tensor.name in output_spec.outputs]
    batch_rows = _batch_rows(calls.endpoint, known.name, meta.inputs, wanted)
    inputs, outputs = (
        {tensor.name: TensorMetadata(tensor.name, tensor.datatype, tuple(tensor.shape)[1:]) for tensor in found}
        for found in (meta.inputs, meta.outputs)
    )
    if known.uncast_outputs:
        inputs[names.TARGETS] = TensorMetadata(names.TARGETS, "INT32", (-1,))
        outputs[names.TARGET_LOGPROBS] = TensorMetadata(names.TARGET_LOGPROBS, "FP32", (-1,))
    return replace(
        known,
        version=version,
        versions=versions,
        inputs=inputs,
        outputs=outputs,
        max_rows=batch_rows or known.max_rows,
        batch_rows=batch_rows,
    )


def _batch_rows(endpoint: str, model: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Return the fixed number of rows per request, 0 for any; raise `TeacherLacks` if tensors have different ones."""
    first = [tensor.shape[0] if tensor.shape else -1 for tensor in inputs]
    if not first or min(first) < 1:
        return 0
    if len({*first, *(tensor.shape[0] for tensor in outputs if tensor.shape and tensor.shape[0] > 0)}) > 1:
        shapes = listed([f"{tensor.name} {list(tensor.shape)}" for tensor in (*inputs, *outputs)])
        raise TeacherLacks(f"{endpoint}: model {model!r} has no batch dimension ({shapes}): {NO_BATCH_REMEDY}")
    return int(first[0])


def is_name(text: str) -> bool:
    """Return whether this is a plausible name of a model, tensor or version."""
    return len(text) <= _LONGEST_NAME and text.isprintable()


async def _model_names(calls: ServerCalls, deadline: float, *, ready: bool = False) -> list[str]:
    index = await calls.call("RepositoryIndex", kserve.RepositoryIndexRequest(ready=ready), deadline)
    return sorted({model.name for model in index.models})


async def _only_model(calls: ServerCalls, deadline: float) -> str:
    found = await _model_names(calls, deadline, ready=True)
    if not found:  # it may be loading the first one
        raise RequestFailed(FailureKind.REJECTED, f"{calls.endpoint} serves no model: name one with model=")
    if len(found) > 1:
        raise TeacherLacks(f"{calls.endpoint} serves {listed(found)}: name one with model=")
    return found[0]


async def _check_model_ready(calls: ServerCalls, model: str, version: str, deadline: float) -> tuple[str, ...]:
    """Check that the requested version of the model is ready; return the versions that the server lists.

    If no version is requested, the result is empty.
    """
    try:
        versions = await _list_versions(calls, model, version, deadline) if version else ()
        request = kserve.ModelReadyRequest(name=model, version=version if versions else "")
        if (await calls.call("ModelReady", request, deadline)).ready:
            return versions
        unknown = ""
    except UnknownModel as exc:
        unknown = str(exc)
    # Triton reports a model as not ready even if it has no such model.
    try:
        known = await _model_names(calls, deadline)
    except RequestFailed:
        if unknown:
            raise TeacherLacks(unknown) from None
        known = []
    if known and model not in known:  # a server without models may be loading the first of them
        has = f"no model {model!r}, only {listed(known)}{did_you_mean(model, known)}"
        raise TeacherLacks(f"{calls.endpoint} has {has}")
    if unknown:
        raise RequestFailed(FailureKind.REJECTED, unknown)
    raise RequestFailed(FailureKind.LOST, f"model {model!r} of {calls.endpoint} is not ready")


async def _list_versions(calls: ServerCalls, model: str, version: str, deadline: float) -> tuple[str, ...]:
    meta = await calls.call("ModelMetadata", kserve.ModelMetadataRequest(name=model), deadline)
    versions = tuple(meta.versions)
    if versions and version not in versions:
        has = ", ".join(map(repr, versions))
        what = f"version {has} of model {model!r}, but version={version!r} is requested"
        raise RequestFailed(FailureKind.REJECTED, f"{calls.endpoint} has {what}")
    return versions


async def _fetch_config(calls: ServerCalls, model: str, deadline: float) -> kserve.ModelConfig | None:
    """Return a model's configuration, None if the server does not report it."""
    try:
        answer = await calls.call("ModelConfig", kserve.ModelConfigRequest(name=model), deadline)
    except RequestFailed as exc:
        if exc.failure.kind is FailureKind.LOST:
            raise
        logger.info("%s does not report the configuration of model %r: %s", calls.endpoint, model, exc)
        return None
    config: kserve.ModelConfig = answer.config
    return config


def _check_names(endpoint: str, *found: str) -> None:
    """Check that texts that appear in logs, labels and cache names are plausible names."""
    if len(found) > _MOST_NAMES:
        what = f"{endpoint}: its model has {len(found)} inputs and outputs, more than {_MOST_NAMES}"
        raise RequestFailed(FailureKind.REJECTED, what)
    for name in found:
        if not is_name(name):
            what = f"{endpoint}: its model's metadata contains {quote(name)}, which is not a valid name or version"
            raise RequestFailed(FailureKind.REJECTED, what)


def _number(config: kserve.ModelConfig, name: str) -> int:
    text = config.parameters[name].string_value
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else 0


def _text(config: kserve.ModelConfig, name: str) -> str:
    text = str(config.parameters[name].string_value)
    return text if is_name(text) else ""


def _newest(versions: Sequence[str]) -> str:
    numbers = all(version.isdecimal() and len(version) <= _MOST_DIGITS for version in versions)
    return max(versions, key=int) if versions and numbers else (versions or ("",))[-1]
