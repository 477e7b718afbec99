"""Defines names on the wire: the service, its methods, and the request parameters and output names that EDL adds.

Other KServe v2 servers ignore parameters that they do not know; a client finds out what a server can do from
`ServerMetadata.extensions`.
"""

from __future__ import annotations

SERVICE = "inference.GRPCInferenceService"

TOP_K = "edl_top_k"
"""Request parameter (int64), and extension: each output is replaced by the k largest logits of each row."""
TEMPERATURE = "edl_temperature"
"""Request parameter (double, default 1): the temperature at which `edl_top_k` sums exp(logit / temperature) over the
classes left out."""
DTYPE = "edl_dtype"
"""Request parameter (string), and extension: "FP16" or "FP32", the datatype of floating-point outputs."""

PRIORITY = "priority"
"""Request parameter (int64) of Triton's extension `schedule_policy`: 1 is the highest, 0 means the model's default."""

TIMEOUT_MS = "edl_timeout_ms"
"""Request parameter (int64): deadline for one request of a stream or tensor channel, in ms after its arrival."""

REQUEST_ID = "x-request-id"
"""Metadata of a ModelInfer call: the id that the server's log contains. For a request on a stream, the log contains the
request's own id instead."""
TRACEPARENT = "traceparent"
"""Metadata of a call, or request parameter (string; takes precedence): the request's span, as in W3C Trace Context."""

MAX_ROWS = "edl_max_rows"
"""Parameter of a model's configuration: the most rows in one request. An EDL server may compute a request in parts."""

MAX_BYTES = "edl_max_message_bytes"
"""Parameter of a model's configuration: the largest request in bytes, whether or not it is in shared memory."""

IDS = "ids"
"""Input of a language model: token ids, INT32 `[rows]`. A sequence of T tokens has T rows. Row t contains token t, and
the teacher's answer for this row predicts token t + 1 (for the last row, the token that would follow)."""
POSITION = "position"
"""Input of a language model, INT32 `[rows]`: the position of a row's token in its sequence, from 0 in steps of 1."""
TARGETS = "targets"
"""Optional input of a language model: token ids whose log-probabilities to return, INT32 `[rows, m]`."""
LOGPROBS = "logprobs"
"""Output of a language model: log-probabilities at temperature 1, FP32 `[rows, vocabulary]`. They are never sent in
full: requests must set `TOP_K`, and the answer contains the outputs of `top_k_names` instead."""
TARGET_LOGPROBS = "target_logprobs"
"""Output of a language model if the request contains `TARGETS`: log-probability of `targets[t, j]` at row t, FP32
`[rows, m]`."""

SEQUENCES = "edl_sequences"
"""Parameter of a model's configuration: the name of the input that is 0 at a sequence's start. Requests contain whole
sequences."""
MAX_SEQUENCE = "edl_max_sequence"
"""Parameter of a model's configuration: the most rows in a sequence."""
MAX_TOP_K = "edl_max_top_k"
"""Parameter of a model's configuration: the largest `TOP_K`. A model with this parameter refuses requests without
`TOP_K`."""
OPTIONAL_INPUTS = "edl_optional_inputs"
"""Parameter of a model's configuration: optional inputs, separated by commas. The model's metadata and
configuration list neither these inputs nor the outputs that depend on them."""
TOKENIZER = "edl_tokenizer"
"""Parameter of a model's configuration: the hash of its tokenizer, as in `TOKENIZER_META`."""
TOKENIZER_META = "tokenizer"
"""Metadata of an instance in discovery: the hash of the model's tokenizer. With a different tokenizer, ids mean
different tokens."""
WEIGHTS_VERSION = "edl_weights_version"
"""Parameter of a model's configuration: the model's version, if this version is a hash of the model's weights and code,
so that equal models have equal versions."""

EXTENSION_SCHEDULE_POLICY = "schedule_policy"
EXTENSION_SHARED_MEMORY = "system_shared_memory"
EXTENSION_NO_NAN = "edl_no_nan"
"""Extension: floating-point outputs are checked, and a request whose answer would contain NaN gets an error instead."""
EXTENSION_CHANNEL = "edl_channel"
"""Extension: the server answers `OPEN_CHANNEL`, and accepts requests over a tensor channel (`edl.protocol.frames`)."""

OPEN_CHANNEL = "/edl.TensorChannel/Open"
"""Method that takes an empty message, and returns JSON: the `port` of the tensor channel and three values as
hexadecimal digits. These values are a `token`, which opens a channel within ten seconds; the `proof` that the server
returns for the token (32 bytes each); and `certificate`, the SHA-256 of the port's certificate (empty without TLS)."""

LOCKED_MEMORY = "edl-arena-"
"""Prefix of the names of a student's shared memory objects, which the student keeps locked (flock) while it runs."""

SHM_REGION = "shared_memory_region"
SHM_OFFSET = "shared_memory_offset"
SHM_NBYTES = "shared_memory_byte_size"

TLS_META = "tls"
"""Metadata of an instance in discovery: "1" if it speaks TLS. For information: students use their own settings."""

PRIORITY_META = "priority"
"""Metadata of an instance in discovery: the priority of requests from students that set no priority."""

RETRY_AFTER_MS = "grpc-retry-pushback-ms"
"""Trailing metadata with UNAVAILABLE: milliseconds after which the server may accept a retry (gRPC proposal A6)."""


def method(name: str) -> str:
    """Return the full path of a method of the service, as gRPC expects it."""
    return f"/{SERVICE}/{name}"


def top_k_names(output: str) -> tuple[str, str, str]:
    """Return the names of the outputs that replace `output` [rows, classes] when `edl_top_k` is requested.

    These outputs are class ids (INT32 [rows, k], by descending logit), the logits of these classes ([rows, k]), and the
    log of the sum of exp(logit / temperature) over the classes left out ([rows], FP32; -inf if none are left out).
    """
    return f"{output}__topk_ids", f"{output}__topk_values", f"{output}__tail_lse"
