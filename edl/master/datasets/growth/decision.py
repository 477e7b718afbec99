"""When what has come is told to the master, and when a source has ended: a pure function."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from edl.errors import SettingsError
from edl.settings import is_above_zero

__all__ = ["FollowDecision", "FollowSettings", "FollowState", "Observation", "decide"]


@dataclass(frozen=True)
class FollowSettings:
    """How a source is followed.

    Attributes:
        poll_s: seconds between two looks at it.
        settle_s: a file in a folder is taken when it has not changed for so many seconds: it might still be written.
        end_after_s: the source has ended when it has not grown for so many seconds; None: not for that.
        end_marker: path or URL of a file; when it is there, the source has ended. Empty: not for that.

    Raises:
        SettingsError: a value cannot be used.
    """

    poll_s: float = 1.0
    settle_s: float = 5.0
    end_after_s: float | None = None
    end_marker: str = ""

    def __post_init__(self) -> None:
        for name in ("poll_s", "settle_s", "end_after_s"):
            value = getattr(self, name)
            if (value is not None or name != "end_after_s") and not (is_above_zero(value) and math.isfinite(value)):
                raise SettingsError(f"{name}={value!r}: must be a number of seconds above 0")


@dataclass(frozen=True)
class FollowState:
    """What a follower knows.

    Attributes:
        units: that were there when it last looked.
        published: units that the master knows.
        grown_s: when the source last grew.
    """

    units: int
    published: int
    grown_s: float


@dataclass(frozen=True)
class Observation:
    """A look at a source.

    Attributes:
        now_s: when; of a clock that never goes back.
        units: that are there; never fewer than before.
        ended: it says, or its marker does, that nothing more will come.
    """

    now_s: float
    units: int
    ended: bool


@dataclass(frozen=True)
class FollowDecision:
    """What is to be done.

    Attributes:
        publish: how many units, in all, the master is to know.
        end: nothing more will come.
    """

    publish: int
    end: bool


def decide(
    state: FollowState, seen: Observation, settings: FollowSettings, *, shard_size: int, flush_s: float
) -> tuple[FollowState, FollowDecision]:
    """Decide what the master is told.

    Whole shards are told at once. Units that fill none are told when the source has ended, or has been quiet for half
    of `flush_s`: the master, too, waits before it hands out a part of a shard.

    Args:
        state: before.
        seen: the look at the source.
        settings: of the follower.
        shard_size: of the data set.
        flush_s: of the data set; 0: parts of shards are not handed out before the end.

    Returns:
        The state after the decision is carried out, and the decision.
    """
    grown_s = seen.now_s if seen.units > state.units else state.grown_s
    quiet_s = seen.now_s - grown_s
    end = seen.ended or (settings.end_after_s is not None and quiet_s >= settings.end_after_s)
    everything = end or (flush_s > 0 and quiet_s >= flush_s / 2)
    publish = seen.units if everything else seen.units // shard_size * shard_size
    publish = max(publish, state.published)
    return replace(state, units=seen.units, published=publish, grown_s=grown_s), FollowDecision(publish, end)
