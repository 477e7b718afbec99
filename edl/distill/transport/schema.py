"""What is asked of teachers, what their models take and give, and what they answer. Values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from edl.distill.compress import TopK
from edl.errors import SettingsError
from edl.protocol.tensors import Array
from edl.settings import is_above_zero, is_count

__all__ = ["OutputSpec", "ModelSpec", "Outputs", "Reply", "TensorMetadata", "check_version", "kserve_datatype"]

Outputs = dict[str, Array | TopK]


class Reply(NamedTuple):
    """A teacher's answer, and the version of the model that it is of; empty if the server does not say."""

    outputs: Outputs
    version: str


def check_version(version: object) -> None:
    """Refuse what names no version: 2 is not "2" in a cache, nor on the wire.

    Raises:
        SettingsError: it is no string.
    """
    if not isinstance(version, str):
        raise SettingsError(f"version={version!r}: must be a string, such as {str(version)!r}; empty for any")


@dataclass(frozen=True)
class OutputSpec:
    """What a student wants of a teacher for each request.

    Attributes:
        outputs: names of the model's outputs.
        model: the model's name in KServe v2 requests; empty for the only model of the server.
        top_k: deliver the k largest logits of each row as `TopK`, None for whole outputs.
        temperature: at which the tail's mass is summed up with `top_k`.
        dtype: "float16" or "float32" for floating-point outputs, None as the model gives them.
        version: labels of this version of the model only; empty for the one that a server answers with by itself.
    """

    outputs: tuple[str, ...]
    model: str = ""
    top_k: int | None = None
    temperature: float = 1.0
    dtype: Literal["float16", "float32"] | None = None
    version: str = ""

    def __post_init__(self) -> None:
        check_version(self.version)
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
    """One input or output of a model. `shape` is without the rows; -1 is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether one row of `shape` is as the model says."""
        return len(shape) == len(self.shape) and all(
            want in (-1, have) for want, have in zip(self.shape, shape, strict=True)
        )


@dataclass(frozen=True)
class ModelSpec:
    """A teacher's model, as its metadata says.

    Attributes:
        name: of the model.
        version: the one that is asked for, or whose answers are expected: the newest, until an answer says another.
            Empty if the server does not say.
        inputs, outputs: by name. Empty if the server does not say.
        max_rows: the most in one request, 0 if the server does not say.
        max_nbytes: of the tensors of one request, 0 if there is no limit.
        versions: all that the server has; where one is asked for, this one, or none if the server lists none.
    """

    name: str
    version: str
    inputs: Mapping[str, TensorMetadata]
    outputs: Mapping[str, TensorMetadata]
    max_rows: int = 0
    max_nbytes: int = 0
    versions: tuple[str, ...] = ()


def kserve_datatype(dtype: Literal["float16", "float32"]) -> str:
    """KServe's name of a dtype that is asked for."""
    return "FP16" if dtype == "float16" else "FP32"
