"""Descriptions of requests, models and answers, and the choice of a request's priority. Values and decisions only.

Triton's extension "schedule_policy" has a request parameter `priority`: 1 is the highest, larger numbers are lower, and
0, or a number beyond the model's `priority_levels`, is the model's default
(https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/protocol/extension_schedule_policy.html).
A server does not interrupt a running batch, so even a request of the highest priority waits for a batch of ours. This
is why `choose_priority` also limits rows and requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from edl.distill.compress import TopK
from edl.errors import SettingsError
from edl.protocol import names
from edl.protocol.tensors import Array
from edl.settings import is_above_zero, is_count

Priority = Literal["auto", "lowest", "default"] | int

_WORDS: Final = ("auto", "lowest", "default")
_MOST_LEVELS: Final = 2**32  # Triton keeps levels in 32 bits; a larger number cannot be a configuration
_SHARE: Final = 16
"""Rows of a borrowing request, as a share of the model's largest batch. Measured with a model whose time grows with its
rows: with an eighth the p99 of the server's own clients was 1.3 times that without us, with a sixteenth 1.1 times."""


@dataclass(frozen=True)
class RequestPriority:
    """The priority of requests to a model, and limits on their size and number."""

    level: int = 0  # the parameter of requests; 0 for none
    max_rows: int = 0  # most rows of a request, 0 for no limit of this kind
    max_in_flight: int = 0  # most requests in flight, 0 for no limit of this kind
    warning: str = ""  # what a person should know, empty if there is nothing


def check_priority(priority: object) -> None:
    """Check that a value is a priority."""
    number = isinstance(priority, int) and not isinstance(priority, bool) and 1 <= priority < _MOST_LEVELS
    if not number and not (isinstance(priority, str) and priority in _WORDS):
        raise SettingsError(f"priority={priority!r}: must be 'lowest', 'default', 'auto', or a level from 1 on")


def parse_priority(text: str) -> Priority:
    """Return a priority from text, such as an option's or that of a registration."""
    value: object = int(text) if text.isascii() and text.isdigit() and len(text) < 11 else text
    check_priority(value)
    return value  # type: ignore[return-value]


def choose_priority(
    wanted: Priority, *, supported: bool, levels: int, max_batch: int, instances: int
) -> RequestPriority:
    """Return how a model is asked.

    `wanted`: "auto" for the lowest level where the model has levels, and nothing else; "lowest" to borrow the
    server from its own clients, with few rows and few requests at a time; "default" to be a client like others; or
    a level. `levels`: `dynamic_batching.priority_levels` of the model's configuration, 0 if unknown. `max_batch`:
    the most rows that the model takes at once, 0 if unknown. `instances`: of the model, 0 if unknown.
    """
    levels = min(levels, _MOST_LEVELS - 1) if supported and levels > 1 else 0
    if wanted == "default":
        return RequestPriority()
    if wanted == "auto":
        return RequestPriority(levels)
    if isinstance(wanted, int):
        if not levels:
            return RequestPriority(warning=f"it has no priority levels: priority={wanted} has no effect")
        beyond = f"it has {levels} priority levels, and priority={wanted} is asked for: {levels} is used"
        return RequestPriority(min(wanted, levels), warning=beyond if wanted > levels else "")
    warning = "" if levels else "it has no priority levels: its own clients wait behind requests of ours that are there"
    # An instance is left to the server's own clients where there are several.
    rows = max(1, max_batch // _SHARE) if max_batch else 0
    return RequestPriority(levels, rows, max(1, instances - 1), warning)


Outputs = dict[str, Array | TopK]


class Reply(NamedTuple):
    """A teacher's answer."""

    outputs: Outputs  # arrays [rows, ...] or `TopK` by name
    version: str  # of the model that answered; empty if the server does not say


def check_version(version: object) -> None:
    """Check that a version is a string: 2 is not "2" in a cache, nor on the wire."""
    if not isinstance(version, str):
        raise SettingsError(f"version={version!r}: must be a string, such as {str(version)!r}; empty for any")


@dataclass(frozen=True)
class OutputSpec:
    """The outputs that a student requests, and their form."""

    outputs: tuple[str, ...]  # names of the model's outputs
    model: str = ""  # the model's name in KServe v2 requests; empty for the only model of the server
    top_k: int | None = None  # deliver the k largest logits of a row as `TopK`, None for whole outputs
    temperature: float = 1.0  # at which the tail's mass is summed up with `top_k`
    # "float16" or "float32" for floating-point outputs, None as the model gives them
    dtype: Literal["float16", "float32"] | None = None
    # labels of this version of the model only; empty for the version that a server answers with by itself
    version: str = ""
    priority: Priority = "auto"  # with which servers are asked that have priorities; see `edl.distill.transport.schema`
    tokenizer: str = ""  # hash of the student's tokenizer, which teachers must have as well; empty for any

    def __post_init__(self) -> None:
        check_version(self.version)
        check_priority(self.priority)
        if not self.outputs or not all(isinstance(name, str) and name for name in self.outputs):
            raise SettingsError(f"outputs {self.outputs!r}: name at least one output of the teacher")
        if len(set(self.outputs)) < len(self.outputs):
            raise SettingsError(f"outputs {self.outputs!r}: a name comes twice")
        if self.top_k is not None and not is_count(self.top_k):
            raise SettingsError(f"top_k={self.top_k!r}: must be a whole number of at least 1, or None")
        if not is_above_zero(self.temperature) or self.temperature == float("inf"):
            raise SettingsError(f"temperature={self.temperature!r}: must be a finite number above 0")
        object.__setattr__(self, "temperature", float(self.temperature))
        if self.dtype not in (None, "float16", "float32"):
            raise SettingsError(f"dtype={self.dtype!r}: must be 'float16', 'float32' or None")


@dataclass(frozen=True)
class TensorMetadata:
    """An input or output of a model, as KServe v2's metadata describe it."""

    name: str  # of the tensor
    datatype: str  # KServe's name, such as FP32
    shape: tuple[int, ...]  # without the rows; -1 is any size

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether a row of this shape is as the model says."""
        return shapes_match(self.shape, shape)


def shapes_match(left: Sequence[int], right: Sequence[int]) -> bool:
    """Return whether two shapes may be equal, where -1 is any size."""
    return left == right or (
        len(left) == len(right) and all(a == b or -1 in (a, b) for a, b in zip(left, right, strict=True))
    )


@dataclass(frozen=True)
class ModelSpec:
    """A teacher's model, as its server's metadata and configuration say, and how the server is asked for it."""

    name: str
    # the version that is asked for, or whose answers are expected: the newest, until an answer says another. Empty if
    # the server does not say.
    version: str
    inputs: Mapping[str, TensorMetadata]  # by name. Empty if the server does not say.
    outputs: Mapping[str, TensorMetadata]  # by name. Empty if the server does not say.
    max_rows: int = 0  # most rows in a request, 0 if the server does not say
    batch_rows: int = 0  # rows that every request must have, 0 for any number
    max_nbytes: int = 0  # of the tensors of a request, 0 without a limit
    # all that the server has; where a version is asked for, only that, or none if the server lists none
    versions: tuple[str, ...] = ()
    max_in_flight: int = 0  # most requests in flight, 0 if that is for the student to choose
    sequences: str = ""  # the input whose 0 begins a sequence, if rows belong to sequences; else empty
    max_top_k: int = 0  # the largest k of `TopK` answers, where whole outputs are never sent; else 0
    max_sequence: int = 0  # most rows of a sequence, 0 if the server does not say
    tokenizer: str = ""  # hash of its tokenizer, empty if the server does not say
    weights_version: str = ""  # the version, if the server says that it is a hash of weights and code; else empty
    extensions: frozenset[str] = frozenset()  # of the server
    named_version: str = ""  # in requests: the one that is asked for, if the server lists any
    version_required: bool = False  # whether an answer that names no version may be of another than was asked for
    priority: int = 0  # of requests; 0 for none
    uncast_outputs: tuple[str, ...] = ()  # that `dtype` is not about: log-probabilities of tokens that were asked for

    @property
    def is_edl(self) -> bool:
        """Whether the server is one of ours."""
        return names.DTYPE in self.extensions


NO_BATCH_REMEDY: Final = (
    "the first dimension of its tensors must be the number of rows, -1 for any number (Triton: max_batch_size). If it "
    "is a fixed number, your source must yield rows of the other dimensions; set_teacher_batch_size (batch_rows) helps "
    "only where a model takes fewer rows than it says"
)


def kserve_datatype(dtype: Literal["float16", "float32"]) -> str:
    """Return KServe's name of a dtype that is asked for."""
    return "FP16" if dtype == "float16" else "FP32"
