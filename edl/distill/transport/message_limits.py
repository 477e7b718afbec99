"""How large messages to and from a teacher may be.

gRPC inflates compressed messages, and takes any size, before this program sees a byte of them: a few hundred bytes
could become gigabytes here. So compression is off, and a channel takes no more than answers to what is asked can be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edl.distill.transport.schema import ModelSpec
from edl.errors import ProtocolError
from edl.protocol import names, tensors
from edl.protocol.tensors import Array

__all__ = [
    "FIRST_ANSWER_NBYTES",
    "HEADER_NBYTES",
    "MESSAGE_LIMITS",
    "MessageLimits",
    "max_answer_nbytes",
    "channel_options",
    "rows_that_fit",
]

FIRST_ANSWER_NBYTES = 64 << 20
"""What a channel takes before it is known what the model answers. Most models need no more, and no second channel."""
HEADER_NBYTES = 64 << 10  # of a request beside its tensors: names, shapes and options, a few hundred bytes mostly
_METADATA_NBYTES = 4 << 20  # of an answer about the server or its model: gRPC's own default for any message
_MARGIN = 4
"""Answers may be so many times as large as their model's outputs: top-k labels of all classes take three times the
bytes of FP16 outputs (INT32 ids beside FP32 values), and FP32 asked for in place of FP16 twice."""
_BESIDE_NBYTES = 4 << 20  # of headers, and of a bundle of answers
_MOST_OF_CHARACTER = 4  # bytes in UTF-8
_METADATA = ("ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig", "RepositoryIndex")
_SHARED_MEMORY = ("SystemSharedMemoryRegister", "SystemSharedMemoryUnregister")


@dataclass(frozen=True)
class MessageLimits:
    """Largest sizes of messages, in bytes.

    Attributes:
        answer_bytes: of an answer, where what was asked for allows as much.
        request_bytes: of a request's tensors, where the teacher does not say that it takes less.
    """

    answer_bytes: int = 1 << 30
    request_bytes: int = 1 << 30


MESSAGE_LIMITS = MessageLimits()


def max_answer_nbytes(spec: ModelSpec, limits: MessageLimits) -> int:
    """Return the bytes that an answer of this model may have, for the most rows in a request.

    That is `limits.answer_bytes` where the model's metadata leave it open.
    """
    row = 0.0
    for output in spec.outputs.values():
        try:
            dtype = tensors.dtype_of(output.datatype)
        except ProtocolError:  # of an output that nobody asks for, or the answers will say so
            return limits.answer_bytes
        if dtype.kind == "O" or -1 in output.shape:
            return limits.answer_bytes
        shape = output.shape
        if spec.max_top_k and shape and shape[-1] > spec.max_top_k:  # sent as the top k alone
            shape = (*shape[:-1], spec.max_top_k)
        row += max(dtype.itemsize, 2) * math.prod(shape)
    if not spec.outputs or not spec.max_rows:
        return limits.answer_bytes
    return int(min(_MARGIN * spec.max_rows * row + _BESIDE_NBYTES, limits.answer_bytes))


def rows_that_fit(fields: Mapping[str, Array], spec: ModelSpec, nbytes: int) -> int:
    """Return how many rows like these a request of so many bytes can hold, in the model's types; at least 1.

    Args:
        fields: arrays [rows, ...] by name.
        spec: the model.
        nbytes: of the request's tensors.
    """
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


def channel_options(nbytes: int) -> list[tuple[str, Any]]:
    """Return the options of a channel on which an answer may have so many bytes."""
    few = {
        "name": [{"service": names.SERVICE, "method": method} for method in (*_METADATA, *_SHARED_MEMORY)],
        "maxResponseMessageBytes": min(nbytes, _METADATA_NBYTES),
    }
    return [
        ("grpc.max_receive_message_length", min(nbytes, 2**31 - 1)),
        ("grpc.service_config", json.dumps({"methodConfig": [few]})),
        ("grpc.service_config_disable_resolution", 1),
        # Say that none is understood, which servers keep to, and inflate nothing of those that do not.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.per_message_decompression", 0),
    ]
