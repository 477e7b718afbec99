"""When a node's agent sends a state to its peer, and when it has the workers keep another: pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from edl.collective.checkpoint.memory.replica_slots import NO_VERSION
from edl.collective.checkpoint.memory.slots import StateVersion
from edl.errors import SettingsError
from edl.settings import positive_float, read

__all__ = ["ReplicaAction", "ReplicaPace", "ReplicationSchedule"]


@dataclass(frozen=True)
class ReplicaPace:
    """How often states are sent.

    Attributes:
        interval_s: seconds from the beginning of a transfer to the next, at least.
        share: of the time that transfers may take, at most. Transfers of T seconds begin T / share apart, so a
            replica is at most T / share + T old: 3 T with a half.
        retry_s: how long to leave a peer alone that did not take a state, in seconds.
        patience_s: how long to wait for workers of this node that have not kept what others have, in seconds. After
            that the state is passed over: they died, or saved it elsewhere.

    Raises:
        SettingsError: a duration is negative, or the share not above 0 and up to 1.
    """

    interval_s: float = 10.0
    share: float = 0.5
    retry_s: float = 10.0
    patience_s: float = 30.0

    @classmethod
    def from_env(cls) -> ReplicaPace:
        """Read `EDL_REPLICA_SHARE`; the rest is as it is.

        Raises:
            SettingsError: the share is not above 0 and up to 1.
        """
        return cls(share=read("EDL_REPLICA_SHARE", positive_float) or cls.share)

    def __post_init__(self) -> None:
        if not (self.interval_s >= 0 and 0 < self.share <= 1 and self.retry_s >= 0 and self.patience_s >= 0):
            raise SettingsError(f"{self}: give durations that are not negative, and a share above 0 and up to 1")


class ReplicaAction(Enum):
    """The action that is due now."""

    WAIT = "wait"
    SEND = "send"
    """Send the newest state that all workers have kept."""
    WANT = "want"
    """Have the workers keep a newer state than any has."""


class ReplicationSchedule:
    """What a node has sent to its present peer, and what comes next. All times are of the same clock, in seconds.

    Args:
        pace: how often states are sent.
    """

    def __init__(self, pace: ReplicaPace) -> None:
        self._pace = pace
        self._sent = NO_VERSION
        self._due = -math.inf
        self._retry = -math.inf
        self._passed_over: tuple[StateVersion, float] = (NO_VERSION, -math.inf)

    def start_world(self, *, same_peer: bool) -> None:
        """Begin another world: its first state is kept at once, and a new peer gets what there is before that.

        Args:
            same_peer: whether the peer is that of the world before.
        """
        if not same_peer:
            self._sent = NO_VERSION
        self._due = -math.inf
        self._retry = -math.inf

    def next_action(self, now: float, common: StateVersion, newest: StateVersion) -> ReplicaAction:
        """Return what to do.

        Args:
            now: the time.
            common: the newest state that all workers of this node have kept.
            newest: the newest that any of them has.
        """
        if common > self._sent:
            return ReplicaAction.SEND if now >= self._retry else ReplicaAction.WAIT
        if newest > max(common, self._sent):
            version, since = self._passed_over
            if version != newest:
                self._passed_over = (newest, now)
                return ReplicaAction.WAIT
            if now - since < self._pace.patience_s:
                return ReplicaAction.WAIT
        return ReplicaAction.WANT if now >= self._due else ReplicaAction.WAIT

    def record_sent(self, version: StateVersion, began: float, ended: float) -> None:
        """Record that the peer has this state of all workers.

        Args:
            version: of the state.
            began: when the transfer began.
            ended: when the peer had it all.
        """
        self._sent = version
        self._due = max(began + self._pace.interval_s, began + (ended - began) / self._pace.share)

    def record_failure(self, now: float) -> None:
        """Record that the peer did not take a state."""
        self._retry = now + self._pace.retry_s
