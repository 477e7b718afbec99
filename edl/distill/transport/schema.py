"""What is asked of teachers, what their models take and give, and what they answer. Values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from edl.distill.compress import TopK
from edl.distill.transport.priority import Priority, check_priority
from edl.errors import SettingsError
from edl.protocol.tensors import Array
from edl.settings import is_above_zero, is_count

__all__ = ["OutputSpec", "ModelSpec", "Outputs", "Reply", "TensorMetadata", "check_version", "kserve_datatype"]

Outputs = dict[str, Array | TopK]


class Reply(NamedTuple):
    """A teacher's answer.

    Attributes:
        outputs: arrays [rows, ...] or `TopK` by name.
        version: of the model that answered; empty if the server does not say.
    """

    outputs: Outputs
    version: str


def check_version(version: object) -> None:
    """Check that a version is a string: 2 is not "2" in a cache, nor on the wire.

    Raises:
        SettingsError: it is no string.
    """
    if not isinstance(version, str):
        raise SettingsError(f"version={version!r}: must be a string, such as {str(version)!r}; empty for any")


@dataclass(frozen=True)
class OutputSpec:
    """What a student asks teachers for.

    Attributes:
        outputs: names of the model's outputs.
        model: the model's name in KServe v2 requests; empty for the only model of the server.
        top_k: deliver the k largest logits of a row as `TopK`, None for whole outputs.
        temperature: at which the tail's mass is summed up with `top_k`.
        dtype: "float16" or "float32" for floating-point outputs, None as the model gives them.
        version: labels of this version of the model only; empty for the version that a server answers with by itself.
        priority: with which servers are asked that have priorities; see `edl.distill.transport.priority`.
        tokenizer: hash of the student's tokenizer, which teachers must have as well; empty for any.

    Raises:
        SettingsError: a value that cannot be.
    """

    outputs: tuple[str, ...]
    model: str = ""
    top_k: int | None = None
    temperature: float = 1.0
    dtype: Literal["float16", "float32"] | None = None
    version: str = ""
    priority: Priority = "auto"
    tokenizer: str = ""

    def __post_init__(self) -> None:
        check_version(self.version)
        check_priority(self.priority)
        if not self.outputs or not all(isinstance(name, str) and name for name in self.outputs):
            raise SettingsError(f"outputs {self.outputs!r}: name at least one output of the teacher")
        if self.top_k is not None and not is_count(self.top_k):
            raise SettingsError(f"top_k={self.top_k!r}: must be a whole number of at least 1, or None")
        if not is_above_zero(self.temperature) or self.temperature == float("inf"):
            raise SettingsError(f"temperature={self.temperature!r}: must be a finite number above 0")
        object.__setattr__(self, "temperature", float(self.temperature))
        if self.dtype not in (None, "float16", "float32"):
            raise SettingsError(f"dtype={self.dtype!r}: must be 'float16', 'float32' or None")


@dataclass(frozen=True)
class TensorMetadata:
    """An input or output of a model, as KServe v2's metadata describe it.

    Attributes:
        name: of the tensor.
        datatype: KServe's name, such as FP32.
        shape: without the rows; -1 is any size.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether a row of this shape is as the model says."""
        return len(shape) == len(self.shape) and all(
            want in (-1, have) for want, have in zip(self.shape, shape, strict=True)
        )


@dataclass(frozen=True)
class ModelSpec:
    """A teacher's model, as its metadata says.

    Attributes:
        name: of the model.
        version: the version that is asked for, or whose answers are expected: the newest, until an answer says another.
            Empty if the server does not say.
        inputs: by name. Empty if the server does not say.
        outputs: by name. Empty if the server does not say.
        max_rows: most rows in a request, 0 if the server does not say.
        max_nbytes: of the tensors of a request, 0 if there is no limit.
        versions: all that the server has; where a version is asked for, only that, or none if the server lists none.
        max_in_flight: most requests in flight, 0 if that is for the student to choose.
        sequences: the input whose 0 begins a sequence, if rows belong to sequences; else empty.
        max_top_k: the largest k of `TopK` answers, where whole outputs are never sent; else 0.
        max_sequence: most rows of a sequence, 0 if the server does not say.
        tokenizer: hash of its tokenizer, empty if the server does not say.
        weights_version: the version, if the server says that it is a hash of weights and code; else empty.
    """

    name: str
    version: str
    inputs: Mapping[str, TensorMetadata]
    outputs: Mapping[str, TensorMetadata]
    max_rows: int = 0
    max_nbytes: int = 0
    versions: tuple[str, ...] = ()
    max_in_flight: int = 0
    sequences: str = ""
    max_top_k: int = 0
    max_sequence: int = 0
    tokenizer: str = ""
    weights_version: str = ""


def kserve_datatype(dtype: Literal["float16", "float32"]) -> str:
    """Return KServe's name of a dtype that is asked for."""
    return "FP16" if dtype == "float16" else "FP32"
