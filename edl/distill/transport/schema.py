"""Descriptions of requests, models and answers; and the function that chooses a request's priority.

Triton's extension "schedule_policy" has a request parameter `priority`: 1 is the highest, larger numbers are lower, and
0, or a number beyond the model's `priority_levels`, is the model's default
(https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/protocol/extension_schedule_policy.html).
`choose_priority` also limits rows and requests, because even the highest priority does not interrupt a running batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from edl.distill.compress import TopK, check_temperature
from edl.errors import SettingsError
from edl.protocol import names
from edl.protocol.tensors import Array
from edl.settings import is_count

Priority = Literal["auto", "lowest", "default"] | int

_WORDS: Final = ("auto", "lowest", "default")
_MOST_LEVELS: Final = 2**32  # Triton stores levels in 32 bits; a larger number is not a valid configuration
_SHARE: Final = 16
"""Divisor of the model's largest batch; the result is the number of rows in a borrowing request. For a model whose time
grows with the number of rows, requests of an eighth of a batch raised the p99 latency of the server's own clients to
1.3 times the latency without EDL; a sixteenth raised it to 1.1 times."""


@dataclass(frozen=True)
class RequestPriority:
    """The priority of requests to a model, and limits on their size and number."""

    level: int = 0  # the parameter of requests; 0 for none
    max_rows: int = 0  # most rows per request, 0 for no limit from priority
    max_in_flight: int = 0  # most requests in flight, 0 for no limit from priority
    warning: str = ""  # a warning for the user, or empty


def check_priority(priority: object) -> None:
    """Raise `SettingsError` unless a value is a priority."""
    number = isinstance(priority, int) and not isinstance(priority, bool) and 1 <= priority < _MOST_LEVELS
    if not number and not (isinstance(priority, str) and priority in _WORDS):
        raise SettingsError(f"priority={priority!r}: must be 'lowest', 'default', 'auto', or a level from 1 up")


def parse_priority(text: str) -> Priority:
    """Parse a priority from text, such as the value of an option or a registration."""
    value: object = int(text) if text.isascii() and text.isdigit() and len(text) < 11 else text
    check_priority(value)
    return value  # type: ignore[return-value]


def choose_priority(
    wanted: Priority, *, supported: bool, levels: int, max_batch: int, instances: int
) -> RequestPriority:
    """Return the priority of requests to a model.

    `wanted`: "auto" for the lowest level if the model has levels, else no priority; "lowest" to borrow the server from
    its own clients, with few rows and few requests at a time; "default" to be an ordinary client; or a level. `levels`
    is `dynamic_batching.priority_levels` in the model's configuration, `max_batch` the largest number of rows that the
    model takes at once, and `instances` the number of its instances; each is 0 if unknown.
    """
    levels = min(levels, _MOST_LEVELS - 1) if supported and levels > 1 else 0
    if wanted == "default":
        return RequestPriority()
    if wanted == "auto":
        return RequestPriority(levels)
    if isinstance(wanted, int):
        if not levels:
            return RequestPriority(warning=f"it has no priority levels: priority={wanted} has no effect")
        beyond = f"it has {levels} priority levels, but priority={wanted} is requested: {levels} is used"
        return RequestPriority(min(wanted, levels), warning=beyond if wanted > levels else "")
    warning = "" if levels else "it has no priority levels: its own clients wait behind EDL's pending requests"
    # One of several instances is left to the server's own clients.
    rows = max(1, max_batch // _SHARE) if max_batch else 0
    return RequestPriority(levels, rows, max(1, instances - 1), warning)


Outputs = dict[str, Array | TopK]


class Reply(NamedTuple):
    """A teacher's answer."""

    outputs: Outputs  # arrays [rows, ...] or `TopK` by name
    version: str  # of the model that answered; empty if the server does not report it


def check_version(version: object) -> None:
    """Check that a version is a string: 2 and "2" differ in a cache and on the wire."""
    if not isinstance(version, str):
        raise SettingsError(f"version={version!r}: must be a string, such as {str(version)!r}; empty for any")


@dataclass(frozen=True)
class OutputSpec:
    """The outputs that a student requests, and the form in which it wants them."""

    outputs: tuple[str, ...]  # names of the model's outputs
    model: str = ""  # the model's name in KServe v2 requests; empty for the only model of the server
    top_k: int | None = None  # deliver the k largest logits per row as `TopK`, None for whole outputs
    temperature: float = 1.0  # at which `top_k` sums up the tail's mass
    dtype: Literal["float16", "float32"] | None = None  # of floating-point outputs; None for the model's own
    version: str = ""  # of all labels; empty for the server's default
    priority: Priority = "auto"  # of requests to servers with priorities; see `choose_priority`
    tokenizer: str = ""  # hash of the student's tokenizer, which teachers must share; empty for any

    def __post_init__(self) -> None:
        check_version(self.version)
        check_priority(self.priority)
        if not self.outputs or not all(isinstance(name, str) and name for name in self.outputs):
            raise SettingsError(f"outputs {self.outputs!r}: name at least one output of the teacher")
        if len(set(self.outputs)) < len(self.outputs):
            raise SettingsError(f"outputs {self.outputs!r}: a name appears twice")
        if self.top_k is not None and not is_count(self.top_k):
            raise SettingsError(f"top_k={self.top_k!r}: must be a whole number of at least 1, or None")
        check_temperature(self.temperature)
        object.__setattr__(self, "temperature", float(self.temperature))
        if self.dtype not in (None, "float16", "float32"):
            raise SettingsError(f"dtype={self.dtype!r}: must be 'float16', 'float32' or None")


@dataclass(frozen=True)
class TensorMetadata:
    """An input or output of a model, as described by KServe v2 metadata."""

    name: str  # of the tensor
    datatype: str  # KServe's name, such as FP32
    shape: tuple[int, ...]  # without the rows; -1 is any size

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether a row of this shape matches the metadata."""
        return shapes_match(self.shape, shape)


def shapes_match(left: Sequence[int], right: Sequence[int]) -> bool:
    """Return whether two shapes may be equal; -1 stands for any size."""
    return left == right or (
        len(left) == len(right) and all(a == b or -1 in (a, b) for a, b in zip(left, right, strict=True))
    )


@dataclass(frozen=True)
class ModelSpec:
    """A teacher's model, as its server's metadata and configuration describe it, and parameters for requests."""

    name: str
    version: str  # requested or expected: the newest, until an answer names another; empty if unknown
    inputs: Mapping[str, TensorMetadata]  # by name. Empty if the server does not say.
    outputs: Mapping[str, TensorMetadata]  # by name. Empty if the server does not say.
    max_rows: int = 0  # most rows in a request, 0 if the server does not say
    batch_rows: int = 0  # rows that every request must have, 0 for any number
    max_nbytes: int = 0  # of a request's tensors, 0 without a limit
    versions: tuple[str, ...] = ()  # all that the server lists; if one is requested, only that; empty if it lists none
    max_in_flight: int = 0  # most requests in flight, 0 if the student chooses
    sequences: str = ""  # the input that is 0 at the start of a sequence, if rows belong to sequences; else empty
    max_top_k: int = 0  # the largest k of `TopK` answers, if whole outputs are never sent; else 0
    max_sequence: int = 0  # most rows of a sequence, 0 if the server does not say
    tokenizer: str = ""  # hash of its tokenizer, empty if the server does not say
    weights_version: str = ""  # the version, if the server says that it is a hash of weights and code; else empty
    extensions: frozenset[str] = frozenset()  # of the server
    named_version: str = ""  # in requests: the requested one, if the server lists any
    version_required: bool = False  # whether an answer without a version may be from a different version than requested
    priority: int = 0  # of requests; 0 for none
    uncast_outputs: tuple[str, ...] = ()  # not converted to `dtype`: log-probabilities of requested tokens

    @property
    def is_edl(self) -> bool:
        """Whether the server is EDL's."""
        return names.DTYPE in self.extensions


NO_BATCH_REMEDY: Final = (
    "the first dimension of its tensors must be the number of rows, -1 for any number (Triton: max_batch_size). If it "
    "is fixed, your source must yield rows of the other dimensions; set_teacher_batch_size (batch_rows) helps "
    "only if a model takes fewer rows than it reports"
)


def kserve_datatype(dtype: Literal["float16", "float32"]) -> str:
    """Return KServe's name for a requested dtype."""
    return "FP16" if dtype == "float16" else "FP32"
