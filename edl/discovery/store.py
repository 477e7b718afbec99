"""The contract of a store: small shared state with leases, compare-and-set, watches and election."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from edl.discovery.registry import _Closing

__all__ = ["Election", "Entry", "Lease", "Store", "StoreSnapshot", "StoreWatch"]


@dataclass(frozen=True)
class Entry:
    """A key's value, and the version that compare-and-set wants; versions of one key only grow."""

    key: str
    value: bytes
    version: int


@dataclass(frozen=True)
class StoreSnapshot:
    """All entries under a prefix. `stale` is empty while the store answers, else why it does not."""

    entries: Mapping[str, Entry]
    stale: str = ""


class Lease(_Closing):
    """A promise of being alive, renewed by a background thread. `close` revokes it and deletes its keys."""

    @property
    @abc.abstractmethod
    def lost(self) -> bool:
        """True once the lease has expired or may have: its keys are gone or may be. It never comes back."""

    @property
    @abc.abstractmethod
    def late_at(self) -> float:
        """When a renewal was last late, by `time.monotonic()`; -inf if none was yet, the present while one is.

        A renewal is late that comes more than half the length of the lease after the one before it. What kept it, a
        store that is away or a machine that stood still, may have ended other holders' leases, who are alive.
        """


class Election(_Closing):
    """A candidate for one name; at most one candidate leads at a time. `close` steps down.

    A candidate that lost its lease campaigns again by itself.
    """

    @property
    @abc.abstractmethod
    def is_leader(self) -> bool:
        """Whether this candidate leads now; False from the moment that its lease may have expired."""

    @abc.abstractmethod
    def leader(self) -> bytes | None:
        """What the present leader campaigned with, None while there is none."""

    @abc.abstractmethod
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until this candidate leads; False when `timeout_s` passed first."""


class StoreWatch(_Closing):
    """Snapshots of a prefix as it changes; only the newest is kept."""

    @abc.abstractmethod
    def get(self, timeout_s: float | None = None) -> StoreSnapshot | None:
        """The next snapshot that differs from the last; the first call returns the state as it is.

        Returns:
            None when `timeout_s` passed, or the watch was closed, without a change.
        """

    def __iter__(self) -> Iterator[StoreSnapshot]:
        while (snapshot := self.get()) is not None:
            yield snapshot


class Store(_Closing):
    """Keys (path-like strings) and values (bytes up to 256 KiB). Thread-safe. Must not be used across a fork.

    A key is one or more parts with single slashes between them, none empty, `.` or `..`. A key that was written with a
    lease belongs to it: as long as the lease lives, only who names it may write the key, and anybody may delete it.

    All methods raise `edl.errors.DiscoveryError` when the store cannot be reached. A write that raises it may have
    happened or not.
    """

    @abc.abstractmethod
    def lease(self, ttl_s: float = 10.0) -> Lease:
        """A lease that others see expire at most about `ttl_s` after this process died. At least 0.5 s."""

    @abc.abstractmethod
    def get(self, key: str) -> Entry | None:
        """The entry of `key`, None if there is none."""

    @abc.abstractmethod
    def list(self, prefix: str) -> list[Entry]:
        """All entries whose key starts with `prefix`, sorted by key."""

    @abc.abstractmethod
    def put(self, key: str, value: bytes, lease: Lease | None = None) -> Entry:
        """Set `key` whatever it was. With a lease the key goes when the lease does.

        Raises:
            LeaseLostError: `lease` is lost.
            ConflictError: a live lease other than `lease` holds the key.
        """

    @abc.abstractmethod
    def compare_and_set(self, key: str, value: bytes, version: int | None, lease: Lease | None = None) -> Entry | None:
        """Set `key` only if its version is still `version` (None: only if there is no such key).

        Returns:
            The new entry; None if somebody else was there first.

        Raises:
            LeaseLostError: `lease` is lost.
            ConflictError: the version is right, but a live lease other than `lease` holds the key.
        """

    @abc.abstractmethod
    def delete(self, key: str, version: int | None = None) -> bool:
        """Delete `key` (only at `version`, if given); whether it was there and was deleted."""

    @abc.abstractmethod
    def watch(self, prefix: str) -> StoreWatch:
        """Follow all keys that start with `prefix` until the watch is closed.

        Does not wait for a store that cannot be reached: the snapshots say so in `stale`.
        """

    @abc.abstractmethod
    def elect(self, name: str, value: bytes, ttl_s: float = 10.0) -> Election:
        """Campaign for `name`, in the background, until closed. `value` tells others who leads.

        The leader holds the key `elections/NAME`, which others may watch.
        """
