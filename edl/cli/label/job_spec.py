"""The agreement of all workers of a labelling job: the data, and what teachers are asked for. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from edl.distill.cache import CacheKey
from edl.distill.labelling import DataFingerprint, LabelPlan
from edl.errors import ProtocolError

__all__ = ["LabelJobSpec", "shard_rows"]

_FORMAT = 1
"""Of the text: a worker of another version of EDL is told so, where it would misread it otherwise."""
_SHARDS, _LEAST_ROWS, _MOST_ROWS = 64, 32, 1024
"""Shards of a data set, at least, so that a dozen of workers end at about the same time; but none of fewer rows than a
request has, and none of more than a second or a minute of work."""
_OPTIONS = {
    "model": "--model",
    "version": "--model-version",
    "outputs": "--outputs",
    "top_k": "--top-k",
    "temperature": "--temperature",
    "dtype": "--dtype",
    "dataset": "--dataset",
    "service": "--service or --teachers",
    "inputs": "--inputs",
}
"""By field of a key, the option that sets it."""


def shard_rows(rows: int, batch_rows: int) -> int:
    """Return how many rows a shard should have: a power of two, unless a request has more.

    Args:
        rows: of the data set.
        batch_rows: of a request.
    """
    wanted = max(rows // _SHARDS, 1)
    return max(min(max(1 << (wanted.bit_length() - 1), _LEAST_ROWS), _MOST_ROWS), batch_rows)


@dataclass(frozen=True)
class LabelJobSpec:
    """The agreement that the first worker of a job sets, and that all others must have.

    Attributes:
        data: of the rows.
        key: of the labels, the model's version included.
    """

    data: DataFingerprint
    key: CacheKey

    def to_json(self) -> str:
        """Return the same text for equal specifications."""
        fields = {"format": _FORMAT, "data": asdict(self.data), "key": json.loads(self.key.to_json())}
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> LabelJobSpec:
        """Return what `to_json` was called on.

        Raises:
            ProtocolError: this is no such text.
        """
        try:
            fields = json.loads(text)
            if fields["format"] != _FORMAT:
                raise ValueError(f"format {fields['format']!r}")
            data, key = fields["data"], fields["key"]
            return cls(
                DataFingerprint(**{**data, "inputs": tuple(data["inputs"])}),
                CacheKey(**{**key, "outputs": tuple(key["outputs"]), "inputs": tuple(key.get("inputs", ()))}),
            )
        except (ValueError, TypeError, KeyError) as exc:
            raise ProtocolError(f"the job's master has no labelling job that this version of EDL knows: {exc}") from exc

    def data_differences(self, data: DataFingerprint) -> list[str]:
        """Return in words how other data differ from these.

        Args:
            data: of this worker.
        """
        return data.differences(self.data, "in the job")

    def option_differences(self, plan: LabelPlan) -> list[str]:
        """Return in words how what is asked for differs, as far as options say, before teachers are asked.

        Args:
            plan: of this worker.
        """
        spec = plan.output_spec
        here = {
            "outputs": spec.outputs,
            "top_k": spec.top_k,
            "temperature": spec.temperature if spec.top_k is not None else 1.0,
            "dtype": spec.dtype,
            "dataset": plan.dataset,
        }
        named = {"model": plan.teachers.model or spec.model, "version": spec.version}
        return self._differing({**here, **{name: value for name, value in named.items() if value}})

    def key_differences(self, key: CacheKey) -> list[str]:
        """Return in words how labels would be kept otherwise.

        Args:
            key: of this worker's labels.
        """
        return self._differing(vars(key))

    def _differing(self, here: Mapping[str, Any]) -> list[str]:
        there = vars(self.key)
        return [
            f"{_OPTIONS[name]}: {_shown(value)} here, {_shown(there[name])} in the job"
            for name, value in here.items()
            if value != there[name]
        ]


def _shown(value: Any) -> str:
    if value in (None, "", ()):
        return "none"
    return ",".join(value) if isinstance(value, tuple) else str(value)
