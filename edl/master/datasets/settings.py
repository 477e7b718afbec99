"""How a data set is cut into shards and handed out, as its creator chooses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from edl.errors import SettingsError
from edl.protocol.master import COMMIT_CHECKPOINT, COMMIT_REPORT, DatasetSpec
from edl.settings import is_above_zero, is_count

__all__ = ["DEFAULT_SHARD_SIZE", "ShardSettings"]

DEFAULT_SHARD_SIZE: Final = 64
"""Units of a shard where nothing else is asked for: a batch or two, so that a worker that is killed loses little work;
the master hands out thousands of shards a second."""
_SEEDS: Final = 1 << 64
"""Seeds are numbers of 64 bits on the wire."""
_MOST: Final = 1 << 62
"""Of units, shard sizes and epochs: the sum of two such numbers is one of 63 bits still."""
_MOST_FAILURES: Final = (1 << 31) - 1
"""A number of 31 bits on the wire."""


@dataclass(frozen=True)
class ShardSettings:
    """How a data set is cut into shards, in which order they are handed out, and when a lease ends.

    Attributes:
        shard_size: units (samples, lines, rows, files) of a shard; None leaves it to the kind of data set: 64, and of
            Parquet the rows of the largest row group.
        epochs: passes over the data; 0 for as many as are asked for.
        shuffle: hand out the shards of an epoch in an order that follows from `seed` and the epoch.
        shuffle_within: read the units of a shard in an order that follows from `seed`, the epoch and the shard.
        seed: of both orders.
        max_failures: a shard that failed so often is poisoned.
        lease_s: a shard goes to another reader when its reader has not renewed its lease for so many seconds.
        session_s: a reader that has sent nothing for so many seconds has ended.
        flush_s: of a source without an end: units that fill no shard are handed out as a short one when the source has
            not grown for about so many seconds; 0: not before it ends.
        commit: "report": a shard is done when it is reported; "checkpoint": when a checkpoint of the reader covers it.

    Raises:
        SettingsError: a value cannot be used.
    """

    shard_size: int | None = None
    epochs: int = 1
    shuffle: bool = False
    shuffle_within: bool = False
    seed: int = 0
    max_failures: int = 3
    lease_s: float = 60.0
    session_s: float = 30.0
    commit: Literal["report", "checkpoint"] = "report"
    flush_s: float = 10.0

    def __post_init__(self) -> None:
        if self.shard_size is not None and not (is_count(self.shard_size) and self.shard_size <= _MOST):
            raise SettingsError(f"shard_size={self.shard_size!r}: must be a whole number from 1 to 2**62, or None")
        if not _is_natural(self.epochs) or self.epochs > _MOST:
            raise SettingsError(f"epochs={self.epochs!r}: must be a whole number from 0 (no end) to 2**62")
        if not _is_natural(self.seed) or self.seed >= _SEEDS:
            raise SettingsError(f"seed={self.seed!r}: must be a whole number from 0 to 2**64 - 1")
        if not is_count(self.max_failures) or self.max_failures > _MOST_FAILURES:
            raise SettingsError(f"max_failures={self.max_failures!r}: must be a whole number from 1 to 2**31 - 1")
        for name in ("lease_s", "session_s"):
            if not _is_duration(getattr(self, name)):
                raise SettingsError(f"{name}={getattr(self, name)!r}: must be a number of seconds above 0")
        if not (is_above_zero(self.flush_s) and math.isfinite(self.flush_s)) and self.flush_s != 0:
            raise SettingsError(f"flush_s={self.flush_s!r}: must be a number of seconds above 0, or 0 for never")
        if self.commit not in ("report", "checkpoint"):
            raise SettingsError(f"commit={self.commit!r}: must be 'report' or 'checkpoint'")

    def spec(self, kind: str, location: str, units: int | None, shard_size: int, index: bytes) -> DatasetSpec:
        """Return the specification of a data set, as `CreateDataset` carries it.

        Raises:
            SettingsError: the settings are not possible for such a data set.

        Args:
            kind: of the data set.
            location: of the data set.
            units: how many it has; None for a source without an end.
            shard_size: units of a shard.
            index: what readers need beside the location.
        """
        if units is None and (self.shuffle or self.shuffle_within or self.epochs != 1):
            raise SettingsError(
                f"{kind}:{location} has no end: it is neither shuffled nor read several times "
                f"(shuffle={self.shuffle}, shuffle_within={self.shuffle_within}, epochs={self.epochs})"
            )
        if units is not None and units > _MOST:
            raise SettingsError(f"{kind}:{location} has more than 2**62 units")
        return DatasetSpec(
            kind=kind,
            location=location,
            units=units,
            shard_size=shard_size,
            seed=self.seed,
            shuffle=self.shuffle,
            epochs=self.epochs,
            max_failures=self.max_failures,
            lease_s=self.lease_s,
            session_s=self.session_s,
            commit=COMMIT_REPORT if self.commit == "report" else COMMIT_CHECKPOINT,
            flush_s=self.flush_s if units is None else 0.0,
            index=index,
        )


def _is_natural(value: object) -> bool:
    return is_count(value) or (type(value) is int and value == 0)


def _is_duration(value: object) -> bool:
    """Tell whether a lease may take so long: a lease without an end would never come back."""
    return is_above_zero(value) and math.isfinite(value)  # type: ignore[arg-type]
