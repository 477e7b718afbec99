"""The contract of a store: small shared state with leases, compare-and-set, watches and election.

`open_store` opens the implementations of this package. Another one subclasses `Store`, `Lease`, `StoreWatch` and
`Election`; `edl.discovery.common` has the parts that these share, and `tests/fast/discovery/conformance` holds every
implementation to what is promised here.

What holds for every class below, unless a method says otherwise:

- **Threads.** All methods may be called from several threads at the same time.
- **Signals.** `close` may be called by a signal handler or finalizer in the middle of any other call, also of the
  thread that it interrupts: it waits for no lock that the interrupted thread may hold.
- **Fork.** A child of the process that opened the object must not use it: methods raise `ClosedError`, and `close` does
  nothing, so that the child ends neither the parent's leases nor its connections.
- **Closing.** `close` of a store closes its leases, watches and elections first. After `close`, methods raise
  `ClosedError`, except where a method says what it returns then.
- **Deadlines.** A call that asks the store takes about `timeout_s` of `open_store` (5 s as it comes) at most, and then
  raises `DiscoveryError`. Nothing else waits without a `timeout_s` of its own.
- **Values that no store could hold** raise `SettingsError` before anything is asked.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from edl.discovery.registry import _Closing

__all__ = ["Election", "Entry", "Lease", "Store", "StoreSnapshot", "StoreWatch"]


@dataclass(frozen=True)
class Entry:
    """A key with its value at a moment.

    Attributes:
        key: as it was written, without what an implementation puts before it.
        value: up to 256 KiB.
        version: what `Store.compare_and_set` and `Store.delete` compare, 1 or more. Every write of a key gives it a
            larger version, also after the key was deleted, until the store loses its memory; versions of different keys
            say nothing about each other.
    """

    key: str
    value: bytes
    version: int


@dataclass(frozen=True)
class StoreSnapshot:
    """All entries under a prefix at a moment.

    Attributes:
        entries: by key. Complete: a key that is not in it was not there.
        stale: empty while the store answers; otherwise why it does not, in words, and `entries` are what was known last
            (none if the store has not answered yet).
    """

    entries: Mapping[str, Entry]
    stale: str = ""


class Lease(_Closing):
    """A sign of life that keys can be tied to, renewed by a background thread until it is closed.

    The thread renews it four times in its length, so that three renewals in a row may fail. `close` ends it at once and
    deletes its keys; if the store does not answer then, a warning is logged, and the lease ends by itself.
    """

    @property
    @abc.abstractmethod
    def lost(self) -> bool:
        """Whether the lease has ended or may have: its keys are gone or may be.

        Looks at a clock of this process and asks the store nothing. This side's clock begins when a renewal is asked
        for and the store's when it is answered: the holder sees the end first. Once True it stays True, also after a
        pause of the whole process; what needs a lease again asks for a new one. True after `close`.
        """

    @property
    @abc.abstractmethod
    def late_at(self) -> float:
        """When a renewal was last late, in seconds of `time.monotonic()`; -inf if none was, the present while it is.

        A renewal is late that comes more than half the length of the lease after the renewal before it. What kept it, a
        store that is away or a machine that stood still, may have ended leases of other holders, who are alive.
        """


class Election(_Closing):
    """A candidate for a name; at most a single candidate leads at a time.

    A background thread campaigns: it creates the key `elections/NAME` under a lease of its own whenever there is no
    such key. A candidate whose lease was lost campaigns again by itself, also after its store was away. `close`
    steps down, so that another candidate leads about a second later at most, on a store that answers.
    """

    @property
    @abc.abstractmethod
    def is_leader(self) -> bool:
        """Whether this candidate leads now; asks the store nothing.

        False from the moment that its lease may have ended, before any other candidate can lead. A leader that is about
        to write what only a leader may write looks here first; a write that takes longer than the rest of the lease may
        still come late, so what it writes is written by `compare_and_set`. False after `close`.
        """

    @abc.abstractmethod
    def leader(self) -> bytes | None:
        """Ask the store who leads.

        Returns:
            The value that the present leader campaigns with; None while there is no leader.

        Raises:
            DiscoveryError: the store cannot be reached.
        """

    @abc.abstractmethod
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until this candidate leads.

        Args:
            timeout_s: how long, in seconds; None for as long as it takes.

        Returns:
            True if it leads; False if `timeout_s` passed, or it was closed meanwhile.
        """


class StoreWatch(_Closing):
    """Snapshots of a prefix as it changes.

    - The first call of `get` returns the present state as soon as the store has answered, also where it is empty.
    - A change is seen within about 0.2 s of the write on a store that answers. Changes are not queued: a watcher that
      falls behind gets the newest snapshot and misses the rest, and a change that was undone before `get` looked
      is not seen. A key that is deleted and written again is seen to have another version.
    - Snapshots follow the order of writes: none shows an older state than the one before, unless the store has lost
      its memory.
    - A store that cannot be reached gives a snapshot with `stale` set and the entries known last, and the watch goes
      on by itself: when the store answers again, a snapshot with `stale` empty follows, with what happened meanwhile.
    - Where several threads call `get`, a snapshot may go to a single thread.
    """

    @abc.abstractmethod
    def get(self, timeout_s: float | None = None) -> StoreSnapshot | None:
        """Wait for a snapshot that differs from the snapshot returned last.

        Args:
            timeout_s: how long, in seconds; 0 looks without waiting, None waits as long as it takes.

        Returns:
            The newest snapshot; None if `timeout_s` passed, or the watch or its store is closed, without a change.
        """

    def __iter__(self) -> Iterator[StoreSnapshot]:
        """Yield snapshots, waiting for every next, until the watch is closed."""
        while (snapshot := self.get()) is not None:
            yield snapshot


class Store(_Closing):
    """Keys and values that processes of several machines share.

    A key is text of at most 512 printable characters: one or more parts with single slashes between them, none of them
    empty, `.` or `..`. A value is `bytes`, 256 KiB at most. A prefix is the beginning of a key, which need not end with
    a slash; the empty prefix is the beginning of all keys.

    A key that was written with a lease belongs to it: while the lease lives, only a write that names it changes the
    key, and the key goes when the lease does. Any process may delete it.

    Every write is atomic, and a read that begins after a write returned sees it, from whichever process. (Consul, while
    its leadership changes hands, may answer a read from a moment before.)

    A write that raises `DiscoveryError` may have happened or not: read the key, or write it again by `compare_and_set`.
    """

    @abc.abstractmethod
    def lease(self, ttl_s: float = 10.0) -> Lease:
        """Make a lease that keys can be tied to, and renew it until it is closed.

        Args:
            ttl_s: seconds after the last renewal until the lease ends, 0.5 to 86,400. Other processes see its keys
                gone about that long after this process died. (etcd counts whole seconds, rounded up.)

        Returns:
            The lease, which lives from now on.

        Raises:
            DiscoveryError: the store cannot be reached.
            SettingsError: `ttl_s` is out of range.
        """

    @abc.abstractmethod
    def get(self, key: str) -> Entry | None:
        """Read a key.

        Args:
            key: see above.

        Returns:
            Its entry; None if there is no such key.

        Raises:
            DiscoveryError: the store cannot be reached. Never raised because there is no such key.
        """

    @abc.abstractmethod
    def list(self, prefix: str) -> list[Entry]:
        """Read all keys under a prefix, as they were at a moment.

        Args:
            prefix: with which the keys begin.

        Returns:
            Their entries, sorted by key; empty if there is none.

        Raises:
            DiscoveryError: the store cannot be reached. Never answered with an empty list.
        """

    @abc.abstractmethod
    def put(self, key: str, value: bytes, lease: Lease | None = None) -> Entry:
        """Set a key, whether it is there or not.

        Args:
            key: to set.
            value: its new value.
            lease: of this store; the key belongs to it from now on. None for a key that stays until it is deleted.

        Returns:
            The new entry.

        Raises:
            LeaseLostError: `lease` is lost.
            ConflictError: the key belongs to a live lease other than `lease`.
            SettingsError: `lease` is another store's.
            DiscoveryError: the store cannot be reached.
        """

    @abc.abstractmethod
    def compare_and_set(self, key: str, value: bytes, version: int | None, lease: Lease | None = None) -> Entry | None:
        """Set a key only if it is as it was when its version was read.

        Args:
            key: to set.
            value: its new value.
            version: that the key must have; None if there must be no such key.
            lease: as for `put`.

        Returns:
            The new entry; None if the key has another version by now, is there against expectation, or is gone. Then
            nothing was written.

        Raises:
            LeaseLostError: `lease` is lost.
            ConflictError: the version is right, but the key belongs to a live lease other than `lease`.
            SettingsError: `lease` is another store's.
            DiscoveryError: the store cannot be reached.
        """

    @abc.abstractmethod
    def delete(self, key: str, version: int | None = None) -> bool:
        """Delete a key, whichever lease it belongs to.

        Args:
            key: to delete.
            version: that the key must have; None for any.

        Returns:
            Whether the key was there, at that version, and was deleted.

        Raises:
            DiscoveryError: the store cannot be reached.
        """

    @abc.abstractmethod
    def watch(self, prefix: str) -> StoreWatch:
        """Follow all keys under a prefix until the watch is closed.

        Does not wait for the store, and does not fail when it is away: the snapshots say so in `stale`.

        Args:
            prefix: with which the keys begin.

        Returns:
            The watch, which has a thread of its own.
        """

    @abc.abstractmethod
    def elect(self, name: str, value: bytes, ttl_s: float = 10.0) -> Election:
        """Campaign for a name in the background, until the election is closed.

        The leader holds the key `elections/NAME`, which others may watch. Does not wait for the store.

        Args:
            name: what the candidates compete for; a key may consist of it.
            value: says to others who leads.
            ttl_s: seconds after which another candidate may lead where the leader was lost; as for `lease`.

        Returns:
            The election, in which this process is a candidate from now on.
        """
