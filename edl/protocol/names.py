"""Names on the wire: the service, its methods, and the request parameters and output names that EDL adds.

Other KServe v2 servers ignore parameters that they do not know; a client finds out what a server can do from
`ServerMetadata.extensions`.
"""

from __future__ import annotations

__all__ = [
    "DTYPE",
    "EXTENSION_OUTPUT_DTYPE",
    "EXTENSION_SHARED_MEMORY",
    "EXTENSION_TOP_K",
    "RETRY_AFTER_MS",
    "SERVICE",
    "SHM_NBYTES",
    "SHM_OFFSET",
    "SHM_REGION",
    "TEMPERATURE",
    "TOP_K",
    "method",
    "top_k_names",
]

SERVICE = "inference.GRPCInferenceService"

TOP_K = "edl_top_k"
"""Request parameter (int64): answer with the k largest logits of each row in place of each output."""
TEMPERATURE = "edl_temperature"
"""Request parameter (double, default 1): the temperature at which the tail's mass is summed up with `edl_top_k`."""
DTYPE = "edl_dtype"
"""Request parameter (string): "FP16" or "FP32", the datatype of floating-point outputs."""

EXTENSION_TOP_K = "edl_top_k"
EXTENSION_OUTPUT_DTYPE = "edl_dtype"
EXTENSION_SHARED_MEMORY = "system_shared_memory"

SHM_REGION = "shared_memory_region"
SHM_OFFSET = "shared_memory_offset"
SHM_NBYTES = "shared_memory_byte_size"

RETRY_AFTER_MS = "grpc-retry-pushback-ms"
"""Trailing metadata beside UNAVAILABLE: milliseconds after which a retry may find room (gRPC proposal A6)."""


def method(name: str) -> str:
    """The full path of a method of the service, as gRPC wants it."""
    return f"/{SERVICE}/{name}"


def top_k_names(output: str) -> tuple[str, str, str]:
    """Names of the outputs that replace `output` [rows, classes] when `edl_top_k` is asked for.

    Returns:
        Names of the class ids (INT32 [rows, k], by falling logit), of their logits ([rows, k]), and of the log of
        the sum of exp(logit / temperature) over the classes left out ([rows], FP32; -inf if none are).
    """
    return f"{output}__topk_ids", f"{output}__topk_values", f"{output}__tail_lse"
