"""The contract of a store: small shared state with leases, compare-and-set, watches and elections.

`open_store` opens EDL's own stores. To add one, subclass `edl.discovery.base_store.BaseStore`, which leaves seven small
methods to a backend; `tests/fast/discovery/conformance` holds every store to what is promised here.

These hold for every class below, unless a method says otherwise:

- **Threads.** All methods may be called from several threads at the same time.
- **Signals.** A signal handler or finalizer may call `close` in the middle of any other call, even of the thread that
  it interrupts: `close` waits for no lock that the interrupted thread may hold.
- **Forks.** A child of the process that opened the object must not use it: methods raise `ClosedError`, and `close`
  does nothing, so that the child ends neither the parent's leases nor its connections.
- **Closing.** `close` of a store first closes its leases, watches and elections. After `close`, methods raise
  `ClosedError`, except where a method says what it returns then.
- **Deadlines.** A call that asks the store takes at most about the `timeout_s` of `open_store` (5 s by default), and
  then raises `DiscoveryError`. Nothing else waits without a `timeout_s` of its own.
- **Impossible values**, which no store could hold, raise `SettingsError` before the store is asked.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from typing_extensions import Self

from edl.errors import SettingsError

__all__ = [
    "MAX_VALUE_BYTES",
    "Closing",
    "Election",
    "Entry",
    "Lease",
    "Store",
    "StoreSnapshot",
    "StoreWatch",
    "check_key",
    "check_prefix",
    "check_value",
]

MAX_VALUE_BYTES: Final = 256 * 1024
"""Consul's transactions, which make compare-and-set atomic, take 512 KiB of JSON with the value in base64."""
MAX_KEY_CHARS: Final = 512
"""Consul's limit, kept everywhere so that a program that runs on one store runs on the others."""


def check_key(key: str) -> str:
    """Return `key` if every store can hold it: parts of printable characters with single slashes between them.

    Raises:
        SettingsError: no key can look like this.
    """
    if not isinstance(key, str) or not key or any(part in ("", ".", "..") for part in key.split("/")):
        raise SettingsError(f"store key {key!r:.80}: expected parts separated by '/', none of them empty, '.' or '..'")
    return _check_text(key)


def check_prefix(prefix: str) -> str:
    """Return `prefix` if keys can begin with it.

    Raises:
        SettingsError: no key can begin like this.
    """
    whole_parts = prefix.split("/")[:-1] if isinstance(prefix, str) else [""]
    if any(part in ("", ".", "..") for part in whole_parts):
        raise SettingsError(f"store prefix {prefix!r:.80}: no key can start like this")
    return _check_text(prefix)


def check_value(value: bytes) -> bytes:
    """Return `value` if it is bytes, and no more than `MAX_VALUE_BYTES`.

    Raises:
        SettingsError: it is not.
    """
    if not isinstance(value, bytes):
        raise SettingsError(f"a store value must be bytes, not {type(value).__name__}")
    if len(value) > MAX_VALUE_BYTES:
        raise SettingsError(f"a store value has at most {MAX_VALUE_BYTES:,} bytes, not {len(value):,}")
    return value


def _check_text(text: str) -> str:
    if not text.isprintable() or len(text) > MAX_KEY_CHARS:
        raise SettingsError(f"store key {text!r:.80}: at most {MAX_KEY_CHARS} printable characters are possible")
    return text


@dataclass(frozen=True)
class Entry:
    """A key with its value at a moment.

    Attributes:
        key: The key, as it was written.
        value: Its value, up to 256 KiB.
        version: What `Store.compare_and_set` and `Store.delete` compare, 1 or more. Every write in a store has a
            larger version than the writes before it, of any key, until the store loses its memory.
    """

    key: str
    value: bytes
    version: int


@dataclass(frozen=True)
class StoreSnapshot:
    """All entries under a prefix at a moment.

    Attributes:
        entries: The entries by key. Complete: a key that is missing did not exist.
        stale: Empty while the store answers. Otherwise the reason why it does not, and `entries` are those known last
            (none if the store has not answered yet).
    """

    entries: Mapping[str, Entry]
    stale: str = ""


class Closing(abc.ABC):
    """An object that is closed when it is no longer needed, by `close` or at the end of a `with` block."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release everything. May be called twice, from any thread, and by signal handlers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Lease(Closing):
    """A sign of life that keys can belong to, renewed by a background thread until it is closed.

    The thread renews four times per lease length, so three renewals in a row may fail. `close` ends the lease at once
    and deletes its keys. If the store does not answer then, a warning is logged, and the lease expires by itself.
    """

    @property
    @abc.abstractmethod
    def lost(self) -> bool:
        """Whether the lease has expired or may have, and its keys with it.

        Compares clocks of this process only, and asks the store nothing. The holder's clock starts when it asks for a
        renewal, the store's when it answers, so the holder notices first. Once True it stays True, even after the
        whole process was paused; ask for a new lease then. True after `close`.
        """

    @property
    @abc.abstractmethod
    def late_at(self) -> float:
        """When a renewal was last late, in seconds of `time.monotonic()`: -inf if never, now while one is late.

        A renewal is late if it comes more than half the lease length after the one before. Whatever delayed it, a store
        that is away or a machine that stood still, may also have ended the leases of others who are alive.
        """


class Election(Closing):
    """A candidate for a name; at most one candidate leads at a time.

    A background thread campaigns: it creates the key `elections/NAME` under a lease of its own whenever that key does
    not exist. A candidate that lost its lease campaigns again by itself, also after its store was away. `close` steps
    down, and another candidate leads about a second later at most, on a store that answers.
    """

    @property
    @abc.abstractmethod
    def is_leader(self) -> bool:
        """Whether this candidate leads now; asks the store nothing.

        False from the moment its lease may have expired, before any other candidate can lead. Check it before every
        write that only a leader may make. A write that takes longer than the rest of the lease may still come late, so
        use `compare_and_set` for it. False after `close`.
        """

    @abc.abstractmethod
    def leader(self) -> bytes | None:
        """Ask the store who leads.

        Returns:
            The value that the leader campaigns with; None while there is no leader.

        Raises:
            DiscoveryError: the store cannot be reached.
        """

    @abc.abstractmethod
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until this candidate leads.

        Args:
            timeout_s: Seconds to wait; None for as long as it takes.

        Returns:
            True if it leads; False if `timeout_s` passed, or it was closed meanwhile.
        """


class StoreWatch(Closing):
    """Snapshots of a prefix as it changes.

    - The first `get` returns the present state as soon as the store has answered, even if it is empty.
    - A change is seen within about 0.2 s of the write on a store that answers. Changes are not queued: a watcher that
      falls behind gets the newest snapshot, and a change that was undone before `get` looked is not seen. A key that is
      deleted and written again has another version.
    - Snapshots follow the order of writes: none shows an older state than the one before, unless the store has lost
      its memory.
    - While the store cannot be reached, a snapshot has `stale` set and the entries known last. The watch goes on by
      itself: when the store answers again, a snapshot with `stale` empty follows.
    - If several threads call `get`, each snapshot may go to only one of them.
    """

    @abc.abstractmethod
    def get(self, timeout_s: float | None = None) -> StoreSnapshot | None:
        """Wait for a snapshot that differs from the one returned last.

        Args:
            timeout_s: Seconds to wait; 0 looks without waiting, None waits as long as it takes.

        Returns:
            The newest snapshot; None if `timeout_s` passed without a change, or the watch or its store was closed.
        """

    def __iter__(self) -> Iterator[StoreSnapshot]:
        """Yield snapshots, waiting for each, until the watch is closed."""
        while (snapshot := self.get()) is not None:
            yield snapshot


class Store(Closing):
    """Keys and values that processes on several machines share.

    A key is text of at most 512 printable characters: one or more parts with single slashes between them, none of them
    empty, `.` or `..`. A value is `bytes`, 256 KiB at most. A prefix is the beginning of a key and need not end with a
    slash; all keys begin with the empty prefix. EDL keeps elections below `elections/`, and on all stores but Consul
    its registry of services below `registry/`.

    A key that was written with a lease belongs to it: while the lease lives, only a write that names it can change the
    key, and the key goes when the lease does. Any process may delete it.

    Every write is atomic, and a read that begins after a write returned sees it, from any process. (Consul, while it
    elects a new leader, may answer a read with a slightly older state.)

    A write that raises `DiscoveryError` may or may not have happened: read the key, or use `compare_and_set`.
    """

    @abc.abstractmethod
    def lease(self, ttl_s: float = 10.0) -> Lease:
        """Make a lease that keys can belong to, and renew it until it is closed.

        Args:
            ttl_s: Seconds after the last renewal until the lease expires, 0.5 to 86,400. If this process dies, others
                see its keys gone about that long after. (etcd counts whole seconds, rounded up.)

        Returns:
            The lease.

        Raises:
            DiscoveryError: the store cannot be reached.
            SettingsError: `ttl_s` is out of range.
        """

    @abc.abstractmethod
    def get(self, key: str) -> Entry | None:
        """Read a key.

        Args:
            key: The key.

        Returns:
            Its entry; None if there is no such key.

        Raises:
            DiscoveryError: the store cannot be reached. Never raised because there is no such key.
        """

    @abc.abstractmethod
    def list(self, prefix: str) -> list[Entry]:
        """Read all keys under a prefix, as they were at one moment.

        Args:
            prefix: What the keys begin with.

        Returns:
            Their entries, sorted by key; empty if there are none.

        Raises:
            DiscoveryError: the store cannot be reached. Never answered with an empty list.
        """

    @abc.abstractmethod
    def put(self, key: str, value: bytes, lease: Lease | None = None) -> Entry:
        """Set a key, whether it exists or not.

        Args:
            key: The key.
            value: Its new value.
            lease: A lease of this store, which the key belongs to from now on; None for a key that stays until it is
                deleted.

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
        """Set a key only if it has not changed since its version was read.

        Args:
            key: The key.
            value: Its new value.
            version: The version the key must have; None if the key must not exist.
            lease: As for `put`.

        Returns:
            The new entry; None if the key has another version, exists unexpectedly, or is gone. Then nothing was
            written.

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
            key: The key.
            version: The version the key must have; None for any.

        Returns:
            Whether the key existed at that version, and was deleted.

        Raises:
            DiscoveryError: the store cannot be reached.
        """

    @abc.abstractmethod
    def watch(self, prefix: str) -> StoreWatch:
        """Follow all keys under a prefix until the watch is closed.

        Does not wait for the store, and does not fail while it is away: the snapshots say so in `stale`.

        Args:
            prefix: What the keys begin with.

        Returns:
            The watch, which has a thread of its own.
        """

    @abc.abstractmethod
    def elect(self, name: str, value: bytes, ttl_s: float = 10.0) -> Election:
        """Campaign for a name in the background, until the election is closed. Does not wait for the store.

        Args:
            name: What the candidates compete for; must be a legal key.
            value: Tells others who leads.
            ttl_s: Seconds after which another candidate may lead if the leader dies; as for `lease`.

        Returns:
            The election, in which this process is a candidate from now on.
        """
