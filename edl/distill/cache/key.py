"""What an answer depends on besides the sample: the cache keeps rows of different keys apart."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from edl.errors import SettingsError

__all__ = ["CacheKey"]


@dataclass(frozen=True)
class CacheKey:
    """Everything that a soft label depends on, except for the sample's id.

    Attributes:
        model, version: as the teachers' model metadata says. Another version is another teacher.
        outputs: names of the outputs kept.
        top_k, temperature: of `TopK` labels; without `top_k` the temperature plays no part and becomes 1.
        dtype: "float16" or "float32" if the labels were asked for or stored in it, None as the model gives them.
        dataset: the user's tag for what the ids mean: the data set, its version, how samples are augmented. Ids of an
            augmented sample must name the augmentation too (for example `f"{index}/{seed}"`).
    """

    model: str
    version: str
    outputs: tuple[str, ...]
    top_k: int | None = None
    temperature: float = 1.0
    dtype: str | None = None
    dataset: str = ""

    def __post_init__(self) -> None:
        if not self.outputs or isinstance(self.outputs, str):
            raise SettingsError(f"cache key with outputs={self.outputs!r}: name at least one output, in a tuple")
        object.__setattr__(self, "outputs", tuple(self.outputs))
        object.__setattr__(self, "temperature", float(self.temperature) if self.top_k is not None else 1.0)

    @property
    def folder(self) -> str:
        """A folder's name: the model's for people, and a hash that tells keys apart."""
        readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", self.model)[:40].strip(".-") or "model"
        return f"{readable}-{hashlib.sha256(self.to_json().encode()).hexdigest()[:20]}"

    def to_json(self) -> str:
        """The same text for equal keys."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> CacheKey:
        """The key that `to_json` wrote.

        Raises:
            ValueError: it did not.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            key = cls(**{**fields, "outputs": tuple(fields["outputs"])})
        except (TypeError, KeyError) as exc:
            raise ValueError(f"not a cache key: {exc}") from exc
        if key.to_json() != json.dumps(fields, sort_keys=True):
            raise ValueError("not a cache key: values of other types")
        return key
