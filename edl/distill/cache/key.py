"""`CacheKey`: what an answer depends on besides the sample. The cache keeps rows of different keys apart."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from edl.errors import SettingsError
from edl.settings import is_above_zero, is_count

__all__ = ["CacheKey"]


@dataclass(frozen=True)
class CacheKey:
    """Everything that a soft label depends on, except for the sample's id.

    Attributes:
        model: its name in requests.
        version: The model's version as the answer names it, or the model's metadata where answers name none. Another
            version is another teacher.
        outputs: names of the outputs kept.
        top_k: The k of `TopK` labels, None for whole outputs.
        temperature: The temperature of `TopK` labels; without `top_k` it plays no part and becomes 1.
        dtype: "float16" or "float32" if the labels were asked for or stored in it, None as the model gives them.
        dataset: the user's tag for what the ids mean: the data set, its version, how samples are augmented. Ids of an
            augmented sample must name the augmentation too (for example `f"{index}/{seed}"`).
        service: Who named the version: the service's name, or the endpoints of fixed teachers. Version "1" of another
            service is another model. Empty where the teachers say that the version is a hash of the weights, as
            `edl serve` does: that is the same model wherever it is served.
        inputs: names of what is sent, where the teachers do not say which inputs their model has; sorted.

    Raises:
        SettingsError: a value of another type, or no output.
    """

    model: str
    version: str
    outputs: tuple[str, ...]
    top_k: int | None = None
    temperature: float = 1.0
    dtype: str | None = None
    dataset: str = ""
    service: str = ""
    inputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.outputs or isinstance(self.outputs, str):
            raise SettingsError(f"cache key with outputs={self.outputs!r}: name at least one output, in a tuple")
        self._check_types()
        object.__setattr__(self, "outputs", tuple(self.outputs))
        object.__setattr__(self, "inputs", tuple(sorted(self.inputs)))
        object.__setattr__(
            self, "top_k", int(self.top_k) if self.top_k is not None else None
        )  # JSON does not know numpy's
        object.__setattr__(self, "temperature", float(self.temperature) if self.top_k is not None else 1.0)

    @property
    def folder(self) -> str:
        """Name of a folder: the model's for people, and a hash that tells keys apart."""
        readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", self.model)[:40].strip(".-") or "model"
        return f"{readable}-{hashlib.sha256(self.to_json().encode()).hexdigest()[:20]}"

    def to_json(self) -> str:
        """Return the same text for equal keys. Fields that older files do not have are left out if empty."""
        fields = asdict(self)
        for name in ("service", "inputs"):
            if not fields[name]:
                del fields[name]
        return json.dumps(fields, sort_keys=True, ensure_ascii=True)

    def _check_types(self) -> None:
        texts = (self.model, self.version, self.dataset, self.service, *self.outputs, *self.inputs)
        wrong = next((text for text in texts if not isinstance(text, str)), None)
        if wrong is not None:
            raise SettingsError(f"cache key with {wrong!r}: names, versions and tags must be strings")
        if self.top_k is not None and not is_count(self.top_k):
            raise SettingsError(f"cache key with top_k={self.top_k!r}: must be a whole number of at least 1, or None")
        if not is_above_zero(self.temperature) or self.temperature == float("inf"):
            raise SettingsError(f"cache key with temperature={self.temperature!r}: must be a finite number above 0")
        if self.dtype not in (None, "float16", "float32"):
            raise SettingsError(f"cache key with dtype={self.dtype!r}: must be 'float16', 'float32' or None")

    @classmethod
    def from_json(cls, text: str) -> CacheKey:
        """Return the key that `to_json` wrote.

        Args:
            text: The text as it was written.

        Raises:
            ValueError: `to_json` did not write this.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            for name in ("outputs", "inputs"):
                if name in fields:
                    fields[name] = tuple(fields[name])
            key = cls(**fields)
        except (TypeError, KeyError, RecursionError) as exc:
            raise ValueError(f"not a cache key: {exc}") from exc
        if key.to_json() != json.dumps(fields, sort_keys=True):
            raise ValueError("not a cache key: values of other types")
        return key
