"""A size, or a sequence of the user's: samples by number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from edl.errors import SettingsError, SourceError
from edl.master.datasets.dataset import Dataset
from edl.master.datasets.index import IndexPart, pack_part
from edl.master.datasets.settings import DEFAULT_SHARD_SIZE, ShardSettings
from edl.quoting import shown

__all__ = ["RangeDataset"]


class RangeDataset(Dataset):
    """The numbers from 0 on, or the samples of a sequence that have these numbers.

    Args:
        spec: see `Dataset`.
        samples: a sequence (`len` and `[number]`); None: the numbers themselves are the samples.
    """

    @classmethod
    def from_size(cls, location: str, units: int, settings: ShardSettings, samples: Any = None) -> Dataset:
        """Cut a range, or a sequence.

        Args:
            location: the size, or the name of the sequence.
            units: the size.
            settings: of the data set.
            samples: the sequence.

        Raises:
            SettingsError: there is nothing in it.
        """
        if units < 1:
            raise SettingsError(f"range:{location} has no samples")
        index = pack_part(IndexPart({"shuffle_within": settings.shuffle_within, "named": samples is not None}))
        return cls(settings.spec("range", location, units, settings.shard_size or DEFAULT_SHARD_SIZE, index), samples)

    def describe(self) -> str:
        """See `Dataset.describe`."""
        return f"range:{shown(self.spec.location)} ({self.spec.units} samples)"

    def _load(self, parts: Sequence[IndexPart]) -> None:
        named = bool(parts and parts[0].head.get("named"))
        if named and self._samples is None:
            raise SettingsError(
                f"the samples of {self.describe()} are made by code of yours: pass samples={self.spec.location!r}, or "
                f"the sequence itself. EDL imports no code because a message names it"
            )
        if self._samples is not None and len(self._samples) != self.spec.units:
            raise SourceError(
                f"the sequence has {len(self._samples)} samples here, and {self.spec.units} where the data set was "
                f"created: every reader needs the same"
            )

    def _read_units(self, start: int, stop: int) -> Iterable[Any]:
        if self._samples is None:
            return range(start, stop)
        return (self._samples[number] for number in range(start, stop))
