"""Inspects a server and its model before the first request: inputs, outputs, limits and extensions.

A server's answers are not trusted, because it may answer anything. `RequestFailed` says whether waiting may help, and
`TeacherLacks` that the server or the student must be changed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edl.distill.dispatch.actions import FailureKind
from edl.distill.transport.calls import HEADER_NBYTES, RequestFailed, ServerCalls, TeacherLacks, UnknownModel
from edl.distill.transport.schema import (
    NO_BATCH_REMEDY,
    ModelSpec,
    OutputSpec,
    RequestPriority,
    TensorMetadata,
    choose_priority,
)
from edl.protocol import kserve, names
from edl.quoting import did_you_mean, listed, quote

logger = logging.getLogger("edl.distill")

_CONFIGURATION = "model_configuration"  # Triton's extension
_LONGEST_NAME = 512  # of a model, tensor or version; longer text is not a name
_MOST_DIGITS = 18  # of a number in text: what 64 bits hold; of thousands of digits Python makes an error
_MOST_NAMES = 1000  # of a model's metadata: more than any model has, or a person can read


@dataclass(frozen=True)
class ServerModel:
    """A server's model, and what the server can do with it."""

    spec: ModelSpec
    extensions: frozenset[str] = frozenset()
    named_version: str = ""  # in requests: the one that is asked for, if the server lists any
    version_required: bool = False  # whether an answer that names no version may be of another than was asked for
    priority: RequestPriority = field(default_factory=RequestPriority)
    uncast_outputs: tuple[str, ...] = ()  # that `dtype` is not about: log-probabilities of tokens that were asked for

    @property
    def is_edl(self) -> bool:
        """Whether it is a server of ours."""
        return names.EXTENSION_OUTPUT_DTYPE in self.extensions


async def probe_model(calls: ServerCalls, output_spec: OutputSpec, deadline: float) -> ServerModel:
    """Return what the server and the model that is asked for are.

    Raises:
        RequestFailed: LOST if the server cannot be reached or is not ready, REJECTED if it lacks the version.
        TeacherLacks: It has no such model, does not say which it has, or wants a token that this student lacks.
    """
    ready = await calls.call("ServerReady", kserve.ServerReadyRequest(), deadline)
    if not ready.ready:
        raise RequestFailed(FailureKind.LOST, f"{calls.endpoint} is not ready")
    metadata = await calls.call("ServerMetadata", kserve.ServerMetadataRequest(), deadline)
    model = output_spec.model or await _only_model(calls, deadline)
    versions = await _check_model_ready(calls, model, output_spec.version, deadline)
    server = ServerModel(
        ModelSpec(model, "", {}, {}, max_nbytes=calls.options.max_request_bytes),
        frozenset(metadata.extensions),
        output_spec.version if versions else "",
        len(versions) > 1,
    )
    config = await _fetch_config(calls, model, deadline) if _CONFIGURATION in server.extensions else None
    if config is not None and server.is_edl:
        server = _with_own_config(server, config, calls.options.max_request_bytes, output_spec)
    elif not server.is_edl:  # a teacher of ours has no other clients, and is asked without a priority
        server = _with_priority(server, config, output_spec)
        if server.priority.warning:
            logger.warning("%s (model %r): %s", calls.endpoint, model, server.priority.warning)
    return replace(server, spec=await fetch_spec(calls, output_spec, server, server.spec, deadline))


def _with_own_config(
    server: ServerModel, config: kserve.ModelConfig, request_bytes: int, output_spec: OutputSpec
) -> ServerModel:
    """Return what a server of ours says in its model's configuration."""
    nbytes = _number(config, names.MAX_BYTES)
    optional = _text(config, names.OPTIONAL_INPUTS).split(",")
    spec = replace(
        server.spec,
        max_rows=_number(config, names.MAX_ROWS),
        max_nbytes=min(nbytes - min(HEADER_NBYTES, nbytes // 2), request_bytes) if nbytes else request_bytes,
        sequences=_text(config, names.SEQUENCES),
        max_top_k=_number(config, names.MAX_TOP_K),
        max_sequence=_number(config, names.MAX_SEQUENCE),
        tokenizer=_text(config, names.TOKENIZER),
        weights_version=_text(config, names.WEIGHTS_VERSION),
    )
    uncast = names.TARGETS in optional and names.TARGET_LOGPROBS in output_spec.outputs
    return replace(server, spec=spec, uncast_outputs=(names.TARGET_LOGPROBS,) if uncast else ())


def _with_priority(server: ServerModel, config: kserve.ModelConfig | None, output_spec: OutputSpec) -> ServerModel:
    """Return what a foreign server's configuration says of batches, and how the server is asked beside its clients."""
    max_batch = max(int(config.max_batch_size), 0) if config is not None else 0
    groups = config.instance_group if config is not None else ()
    priority = choose_priority(
        output_spec.priority,
        supported=names.EXTENSION_SCHEDULE_POLICY in server.extensions,
        levels=config.dynamic_batching.priority_levels if config is not None else 0,
        max_batch=max_batch,
        instances=sum(max(group.count, 0) * max(len(group.gpus), 1) for group in groups),
    )
    max_rows = min(filter(None, (max_batch, priority.max_rows)), default=0)
    spec = replace(server.spec, max_rows=max_rows, max_in_flight=priority.max_in_flight)
    return replace(server, spec=spec, priority=priority)


async def fetch_spec(
    calls: ServerCalls, output_spec: OutputSpec, server: ServerModel, known: ModelSpec, deadline: float
) -> ModelSpec:
    """Return the model with its present metadata. `known` is what answers have said of its version so far."""
    model = known.name
    meta = await calls.call(
        "ModelMetadata", kserve.ModelMetadataRequest(name=model, version=server.named_version), deadline
    )
    if meta.name and meta.name != model:
        what = f"{calls.endpoint} describes model {quote(meta.name)} where {model!r} is asked for"
        raise RequestFailed(FailureKind.REJECTED, what)
    versions = tuple(meta.versions)
    _check_names(calls.endpoint, *versions, *(tensor.name for tensor in (*meta.inputs, *meta.outputs)))
    version = _newest(versions)
    if output_spec.version:
        version = output_spec.version
        versions = (version,) if versions else ()
    elif versions == known.versions and (known.version in versions or not versions):
        version = known.version  # as answers said: perhaps not the newest, perhaps of a server that lists none
    wanted = [tensor for tensor in meta.outputs if tensor.name in output_spec.outputs]
    batch_rows = _batch_rows(calls.endpoint, model, meta.inputs, wanted)
    inputs = {tensor.name: _metadata_of(tensor) for tensor in meta.inputs}
    outputs = {tensor.name: _metadata_of(tensor) for tensor in meta.outputs}
    if server.uncast_outputs:
        inputs[names.TARGETS] = TensorMetadata(names.TARGETS, "INT32", (-1,))
        outputs[names.TARGET_LOGPROBS] = TensorMetadata(names.TARGET_LOGPROBS, "FP32", (-1,))
    max_rows = batch_rows or known.max_rows
    spec = replace(known, version=version, versions=versions, max_rows=max_rows, batch_rows=batch_rows)
    return replace(spec, inputs=inputs, outputs=outputs)


def _batch_rows(endpoint: str, model: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Return the rows that every request must have, 0 for any number: the first size of all tensors, if it is fixed.

    Raises:
        TeacherLacks: These sizes are fixed and differ, so they are no rows.
    """
    first = [tensor.shape[0] if tensor.shape else -1 for tensor in inputs]
    if not first or min(first) < 1:
        return 0
    if len({*first, *(tensor.shape[0] for tensor in outputs if tensor.shape and tensor.shape[0] > 0)}) > 1:
        shapes = listed([f"{tensor.name} {list(tensor.shape)}" for tensor in (*inputs, *outputs)])
        raise TeacherLacks(f"{endpoint}: model {model!r} has no batch dimension ({shapes}): {NO_BATCH_REMEDY}")
    return int(first[0])


def is_name(text: str) -> bool:
    """Return whether this is text that a person could have meant as the name of a model, tensor or version."""
    return len(text) <= _LONGEST_NAME and text.isprintable()


async def _only_model(calls: ServerCalls, deadline: float) -> str:
    index = await calls.call("RepositoryIndex", kserve.RepositoryIndexRequest(ready=True), deadline)
    found = sorted({model.name for model in index.models})
    if len(found) != 1:
        has = f"serves {listed(found)}" if found else "serves no model"
        # A server without models may be loading the first of them.
        error = TeacherLacks if found else functools.partial(RequestFailed, FailureKind.REJECTED)
        raise error(f"{calls.endpoint} {has}: say which one with model=")
    return str(found[0])


async def _check_model_ready(calls: ServerCalls, model: str, version: str, deadline: float) -> tuple[str, ...]:
    """Check that the server has the model, in the version that is asked for, and that it is ready.

    Returns:
        The versions that the server lists; none where none is asked for.

    Raises:
        RequestFailed: LOST if it is not ready, REJECTED if the server lacks the version.
        TeacherLacks: The server has no such model.
    """
    try:
        versions = await _list_versions(calls, model, version, deadline) if version else ()
        request = kserve.ModelReadyRequest(name=model, version=version if versions else "")
        if (await calls.call("ModelReady", request, deadline)).ready:
            return versions
        unknown = ""
    except UnknownModel as exc:
        unknown = str(exc)
    # Triton says that a model is not ready also where it has no such model.
    try:
        index = await calls.call("RepositoryIndex", kserve.RepositoryIndexRequest(), deadline)
    except RequestFailed:
        if unknown:
            raise TeacherLacks(unknown) from None
    else:
        known = sorted({found.name for found in index.models})
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
        what = f"version {has} of model {model!r}, and version={version!r} is asked for"
        raise RequestFailed(FailureKind.REJECTED, f"{calls.endpoint} has {what}")
    return versions


async def _fetch_config(calls: ServerCalls, model: str, deadline: float) -> kserve.ModelConfig | None:
    """Return a model's configuration, None if the server does not tell it."""
    try:
        answer = await calls.call("ModelConfig", kserve.ModelConfigRequest(name=model), deadline)
    except RequestFailed as exc:
        if exc.failure.kind is FailureKind.LOST:
            raise
        logger.info("%s does not tell the configuration of model %r: %s", calls.endpoint, model, exc)
        return None
    config: kserve.ModelConfig = answer.config
    return config


def _check_names(endpoint: str, *found: str) -> None:
    """Check that what goes into logs, labels and caches' names is text that a person could have meant."""
    if len(found) > _MOST_NAMES:
        what = f"{endpoint}: its model has {len(found)} inputs and outputs, more than {_MOST_NAMES}"
        raise RequestFailed(FailureKind.REJECTED, what)
    for name in found:
        if not is_name(name):
            what = f"{endpoint}: its model's metadata has {quote(name)} in it, which is no name and no version"
            raise RequestFailed(FailureKind.REJECTED, what)


def _number(config: kserve.ModelConfig, name: str) -> int:
    """Return a parameter of a model's configuration, 0 if it is none or no number."""
    text = config.parameters[name].string_value
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else 0


def _text(config: kserve.ModelConfig, name: str) -> str:
    """Return a parameter of a model's configuration, empty if it is none or no name."""
    text = str(config.parameters[name].string_value)
    return text if is_name(text) else ""


def _newest(versions: Sequence[str]) -> str:
    """Return the version that a server answers with if it is not told which.

    Triton takes the highest number. Elsewhere a version is any text.
    """
    numbers = all(version.isdecimal() and len(version) <= _MOST_DIGITS for version in versions)
    return max(versions, key=int) if versions and numbers else (versions or ("",))[-1]


def _metadata_of(tensor: Any) -> TensorMetadata:
    return TensorMetadata(tensor.name, tensor.datatype, tuple(tensor.shape)[1:])
