"""Stores: small state that processes share, with leases, compare-and-set, watches and elections.

A backend subclasses `Store` and implements its seven abstract methods, from `grant` to `follow`. Argument checks, lease
renewal, watches and elections are the same for all stores. The tests in `tests/fast/discovery/conformance` check the
promises below.

These rules apply to every class below, unless a method says otherwise:

- **Threads.** All methods are thread-safe.
- **Forks.** A child of the process that opened the object must not use it: methods raise `ClosedError`, and `close`
  does nothing, so that the child ends neither the parent's leases nor its connections.
- **Closing.** Closing a store first closes its leases, watches and elections. After `close`, methods raise
  `ClosedError`, unless a method documents a return value for that case.
- **Deadlines.** A call that queries the store raises `DiscoveryError` if the store has not answered after about the
  `timeout_s` of `open_store` (5 s by default). Other calls wait only if they have their own `timeout_s`.
- **Impossible values.** Values that no store could hold raise `SettingsError` before any request to the store.
"""

from __future__ import annotations

import abc
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from edl.background import BackgroundLoop
from edl.discovery.records import check_ttl
from edl.discovery.watching import FollowedWatch, Follower
from edl.errors import ClosedError, ConflictError, DiscoveryError, LeaseLostError, SettingsError
from edl.notifier import Notifier
from edl.resource import Resource

log = logging.getLogger("edl.discovery")

MAX_VALUE_BYTES: Final = 256 * 1024
"""Consul's transactions, which make compare-and-set atomic, accept 512 KiB of JSON with the value in base64."""
MAX_KEY_CHARS: Final = 512
"""Consul's limit, enforced everywhere so that a program works the same on every store."""
RENEWALS: Final = 4
"""Renewals per lease length: three may fail before the lease expires."""
_RETRY_S: Final = 0.5
"""The longest wait before a failed renewal is retried, so that all leases recover soon after a store restarts."""
_CAMPAIGN_S: Final = 0.2
"""Wait after a failed attempt to lead. It is short because a job without a leader stalls, and an attempt sends only
three small requests."""


def check_key(key: str) -> str:
    """Return `key` if it suits every store: parts of printable characters with single slashes between them."""
    if not isinstance(key, str) or not key or any(part in ("", ".", "..") for part in key.split("/")):
        raise SettingsError(f"store key {key!r:.80}: expected parts separated by '/', none of them empty, '.' or '..'")
    return _check_text(key)


def check_prefix(prefix: str) -> str:
    """Return `prefix` if keys can begin with it."""
    whole_parts = prefix.split("/")[:-1] if isinstance(prefix, str) else [""]
    if any(part in ("", ".", "..") for part in whole_parts):
        raise SettingsError(f"store prefix {prefix!r:.80}: no key can start like this")
    return _check_text(prefix)


def check_value(value: bytes) -> bytes:
    """Return `value` if it is at most `MAX_VALUE_BYTES` bytes."""
    if not isinstance(value, bytes):
        raise SettingsError(f"a store value must be bytes, not {type(value).__name__}")
    if len(value) > MAX_VALUE_BYTES:
        raise SettingsError(f"a store value may have at most {MAX_VALUE_BYTES:,} bytes, not {len(value):,}")
    return value


def _check_text(text: str) -> str:
    if not text.isprintable() or len(text) > MAX_KEY_CHARS:
        raise SettingsError(f"store key {text!r:.80}: expected at most {MAX_KEY_CHARS} printable characters")
    return text


def retry_s(ttl_s: float) -> float:
    """Return how many seconds to wait after a failed renewal of a lease with this length."""
    return min(ttl_s / RENEWALS / 2, _RETRY_S)


def held_by_another(key: str) -> ConflictError:
    """Return the error for a write to a key that belongs to another lease."""
    return ConflictError(f"key {key!r} is held by another lease: only that lease can write it")


@dataclass(frozen=True)
class Entry:
    """A key with its value at one moment.

    Attributes:
        key: The key in the form in which it was written.
        value: The key's value, up to 256 KiB.
        version: The number that `Store.compare_and_set` and `Store.delete` compare, at least 1. Every write in a store
            gets a larger version than all earlier writes to any key, unless the store loses its data.
    """

    key: str
    value: bytes
    version: int


Entries = Mapping[str, Entry]


@dataclass(frozen=True)
class StoreSnapshot:
    """All entries under a prefix at one moment.

    Attributes:
        entries: The entries by key. This mapping is complete: a key that is missing did not exist.
        stale: Empty while the store answers. Otherwise the reason why it does not answer; `entries` then contains the
            last known entries (none if the store has not answered yet).
    """

    entries: Entries
    stale: str = ""


class StoreWatch(FollowedWatch[Entries, StoreSnapshot]):
    """Snapshots of a prefix as it changes.

    - The first `get` returns the current state as soon as the store has answered, even if that state is empty.
    - If the store answers, a change is seen within about 0.2 s after the write. Changes are not queued: a caller that
      falls behind gets the newest snapshot, and does not see a change that was undone before it called `get`. A key
      that is deleted and written again has a new version.
    - Snapshots follow the order of writes: no snapshot shows an older state than the previous snapshot, unless the
      store has lost its data.
    - While the store cannot be reached, a snapshot has `stale` set and the last known entries. The watch retries by
      itself: when the store answers again, a snapshot with `stale` empty follows.
    - If several threads call `get`, each snapshot may go to only one of them.

    Args:
        follower: Follows the prefix in the backend.
    """

    def __init__(self, follower: Follower[Entries]) -> None:
        self._last: Entries = {}
        super().__init__(follower, self._remember, lambda reason: StoreSnapshot(self._last, stale=reason))

    def _remember(self, entries: Entries) -> StoreSnapshot:
        self._last = entries
        return StoreSnapshot(entries)


class Claim(abc.ABC):
    """A lease in a backend. It lasts only while it is renewed. Its methods may raise DiscoveryError.

    Attributes:
        granted: A monotonic time just before the lease was granted, so that the lease expires earlier by the holder's
            clock than by the backend's clock.
    """

    def __init__(self) -> None:
        self.granted = time.monotonic()

    @abc.abstractmethod
    def renew(self) -> bool:
        """Renew the lease; return False if it has expired."""

    @abc.abstractmethod
    def withdraw(self) -> None:
        """End the lease now, with its keys, and release this object's resources. Called once."""


class Lease(Resource):
    """A sign of life that keys can belong to, renewed by a background thread until it is closed.

    The thread renews the lease four times per lease length, so three renewals in a row may fail. `close` ends the lease
    at once and deletes its keys. If the store does not answer at that time, a warning is logged, and the lease expires
    by itself.

    Args:
        claim: The claim that the backend has just granted.
        ttl_s: Seconds after the last renewal until the lease expires.
    """

    def __init__(self, claim: Claim, ttl_s: float) -> None:
        super().__init__()
        self.claim = claim
        self._ttl_s = ttl_s
        self._expires = claim.granted + ttl_s
        self._late_at = -math.inf
        self._forfeited = False
        self._renew_at = time.monotonic() + ttl_s / RENEWALS
        self._own(BackgroundLoop("edl-lease", self._step))

    @property
    def lost(self) -> bool:
        """Whether the lease, and with it the lease's keys, has expired or may have expired.

        Uses only this process's clock, and sends no request. The holder counts from its request for a renewal, and the
        store from its later answer, so the holder is the first to notice that the lease has expired. Once True, the
        value stays True, even after the whole process was paused; get a new lease then. True after `close`.
        """
        if not self._closed:
            self._check_process()
        # Checks the clock every time: after a pause of the process, the thread may not have noticed yet.
        if self._closed or time.monotonic() >= self._expires:
            self._forfeited = True
        return self._forfeited

    @property
    def late_at(self) -> float:
        """When a renewal was last late, by `time.monotonic()`: -inf if never, the current time while a renewal is late.

        A renewal is late if it follows the previous one by more than half the lease length. The cause of the delay,
        such as an unreachable store or a stalled machine, may also have ended the leases of other live processes.
        """
        self._record_lateness()
        return self._late_at

    def forfeit(self) -> None:
        """Record that the store reports the lease as expired."""
        self._forfeited = True

    def _record_lateness(self) -> None:
        now = time.monotonic()
        if now > self._expires - self._ttl_s / 2:
            self._late_at = now

    def _step(self) -> float | None:
        asked = time.monotonic()
        if asked < self._renew_at:  # just granted
            return self._renew_at - asked
        if self.lost:
            return None
        try:
            if not self.claim.renew():
                self._forfeited = True
                log.warning("a lease of %g s has expired", self._ttl_s)
                return None
        except DiscoveryError as exc:
            log.debug("a lease of %g s could not be renewed: %s", self._ttl_s, exc)
            return retry_s(self._ttl_s)
        if not self.lost:
            self._record_lateness()
            self._expires = asked + self._ttl_s
        return self._ttl_s / RENEWALS

    def _release(self) -> None:
        try:
            self.claim.withdraw()
        except (DiscoveryError, ClosedError) as exc:  # another thread may close the store at this moment
            log.warning("a lease could not be ended; it expires within %g s: %s", self._ttl_s, exc)


class Election(Resource):
    """A candidate for a name; at most one candidate leads at a time.

    A background thread campaigns: it creates the key `elections/NAME` under its own lease whenever that key does not
    exist. A candidate that has lost its lease campaigns again by itself, even after an outage of the store. On `close`,
    the candidate steps down, and another candidate leads within about a second if the store answers.

    Args:
        store: The store in which the candidates compete.
        name: The name that the candidates compete for.
        value: Tells others which candidate leads.
        ttl_s: Length of the candidate's lease in seconds.
    """

    def __init__(self, store: Store, name: str, value: bytes, ttl_s: float) -> None:
        super().__init__()
        self._store = store
        self._key = check_key(f"elections/{name}")
        self._value = value
        self._ttl_s = ttl_s
        self._lease: Lease | None = None
        self._written: int | None = None  # the version of the key that this candidate wrote, under its current lease
        self._leads = False
        self._changed = Notifier()
        self._watch: StoreWatch = self._own(store.watch(self._key))
        self._own(BackgroundLoop("edl-election", self._campaign, self._watch.close))

    @property
    def is_leader(self) -> bool:
        """Whether this candidate leads now; sends no request.

        The value is False from the moment when this candidate's lease may have expired, before any other candidate can
        lead. Check this value before every write that only a leader may make. A write that takes longer than the rest
        of the lease may arrive after another candidate has become the leader, so use `compare_and_set` for such writes.
        The value is False after `close`.
        """
        if not self._closed:
            self._check_process()
        lease = self._lease
        return self._leads and lease is not None and not lease.lost and not self._closed

    def leader(self) -> bytes | None:
        """Return the leader's `value` from the store; None while no candidate leads.

        Raises:
            DiscoveryError: The store cannot be reached.
        """
        self._check()
        entry = self._store.get(self._key)
        return None if entry is None else entry.value

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until this candidate leads.

        Args:
            timeout_s: Seconds to wait; None for as long as it takes.

        Returns:
            True if this candidate leads; False if `timeout_s` passed, or the election was closed during the wait.
        """
        self._check()
        self._changed.wait_for(lambda: self._closed or self.is_leader, timeout_s)
        return not self._closed and self.is_leader

    def _campaign(self) -> float | None:
        try:
            self._try()
        except (DiscoveryError, LeaseLostError) as exc:
            log.debug("election %s: %s", self._key, exc)
            return _CAMPAIGN_S
        except ClosedError:  # the store is being closed, and this candidate with it
            return None
        # The watch only wakes this thread, which then reads the state from the store. The watch misses a key that was
        # created and deleted between two checks, so wait at most a second.
        self._watch.get(min(self._ttl_s / 4, 1.0))
        return 0.0

    def _try(self) -> None:
        """Find out whether this candidate leads; take the key if it is free."""
        if self._lease is None or self._lease.lost:
            self._drop_lease()
            self._lease = self._store.lease(self._ttl_s)
        entry = self._store.get(self._key)
        if entry is not None:
            # Even if an earlier check did not find the key: a server that has just started may be behind.
            self._set_leads(entry.version == self._written)
            return
        self._leads = False
        try:
            entry = self._store.compare_and_set(self._key, self._value, None, self._lease)
        except DiscoveryError:
            # The write may still have happened, and then no process would know the leader: give up the key with
            # its lease.
            self._drop_lease()
            raise
        if entry is not None:
            self._written = entry.version
            self._set_leads(True)

    def _set_leads(self, leads: bool) -> None:
        self._leads = leads
        self._changed.notify()

    def _drop_lease(self) -> None:
        self._leads, self._written = False, None
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def _halt(self) -> None:
        self._changed.notify()

    def _release(self) -> None:
        self._leads = False
        if self._lease is not None:
            self._lease.close()


class Store(Resource, abc.ABC):
    """Keys and values that processes on several machines share.

    A key is text of at most 512 printable characters: one or more parts with single slashes between them, none of them
    empty, `.` or `..`. A value is `bytes`, at most 256 KiB. A prefix is the beginning of a key and need not end with a
    slash; all keys begin with the empty prefix. EDL keeps elections below `elections/`, and on all stores but Consul
    its registry of services below `registry/`.

    A key that was written with a lease belongs to that lease. While the lease is live, only a write with the same lease
    can change the key. When the lease ends, the key is deleted. Any process may delete the key.

    Every write is atomic, and a read that begins after a write has returned sees this write, from any process. (While
    Consul elects a new leader, it may answer a read with a slightly older state.)

    A write that raises `DiscoveryError` may or may not have happened: read the key, or use `compare_and_set`.
    """

    def lease(self, ttl_s: float = 10.0) -> Lease:
        """Return a new lease that keys can belong to, renewed until it is closed.

        Args:
            ttl_s: Seconds after the last renewal until the lease expires, 0.5 to 86,400. If this process dies, the
                lease's keys disappear after about that time. (etcd counts whole seconds, rounded up.)

        Raises:
            DiscoveryError: The store cannot be reached.
            SettingsError: `ttl_s` is out of range.
        """
        self._check()
        ttl_s = check_ttl(ttl_s)
        return self._own(Lease(self.grant(ttl_s), ttl_s))

    def get(self, key: str) -> Entry | None:
        """Return a key's entry; None if the key does not exist.

        Args:
            key: The key.

        Raises:
            DiscoveryError: The store cannot be reached.
        """
        self._check()
        return self.read(check_key(key))

    def list(self, prefix: str) -> list[Entry]:
        """Return the entries of all keys under a prefix at one moment, sorted by key; empty if there are no keys.

        Args:
            prefix: The beginning of the keys.

        Raises:
            DiscoveryError: The store cannot be reached; an outage never gives an empty list.
        """
        self._check()
        return [*self.read_all(check_prefix(prefix))]

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> Entry:
        """Set a key, whether or not it exists.

        Args:
            key: The key.
            value: The new value of the key.
            lease: A lease of this store that the key will belong to; None for a key that stays until deleted.

        Returns:
            The new entry.

        Raises:
            LeaseLostError: `lease` is lost.
            ConflictError: The key belongs to a live lease other than `lease`.
            SettingsError: `lease` belongs to another store.
            DiscoveryError: The store cannot be reached.
        """
        entry = self._write(key, value, None, lease)
        if entry is None:
            raise DiscoveryError(f"{self!r} compared a version without being asked to")
        return entry

    def compare_and_set(self, key: str, value: bytes, version: int | None, lease: Lease | None = None) -> Entry | None:
        """Set a key only if it has not changed since its version was read.

        Args:
            key: The key.
            value: The new value of the key.
            version: The version that the key must have; None if the key must not exist.
            lease: A lease of this store that the key will belong to; None for a key that stays until deleted.

        Returns:
            The new entry; None, with nothing written, if the key's version is not `version`.

        Raises:
            LeaseLostError: `lease` is lost.
            ConflictError: The version is right, but the key belongs to a live lease other than `lease`.
            SettingsError: `lease` belongs to another store.
            DiscoveryError: The store cannot be reached.
        """
        if version is not None and version < 1:  # no key has that version, and 0 has a special meaning to `write`
            self._check()
            check_key(key)
            check_value(value)
            return None
        return self._write(key, value, version or 0, lease)

    def _write(self, key: str, value: bytes, expected: int | None, lease: Lease | None) -> Entry | None:
        self._check()
        check_key(key)
        check_value(value)
        if lease is None:
            return self.write(key, value, expected, None)
        if not isinstance(lease, Lease) or not self.owns(lease.claim):
            raise SettingsError(f"{lease!r} is not a lease of {self!r}")
        if lease.lost:
            raise LeaseLostError("the lease has expired")
        try:
            return self.write(key, value, expected, lease.claim)
        except LeaseLostError:
            lease.forfeit()
            raise

    def delete(self, key: str, version: int | None = None) -> bool:
        """Delete a key, whichever lease it belongs to.

        Args:
            key: The key.
            version: The version that the key must have; None for any version.

        Returns:
            Whether the key existed at that version, and was deleted.

        Raises:
            DiscoveryError: The store cannot be reached.
        """
        self._check()
        check_key(key)
        return (version is None or version > 0) and self.remove(key, version)

    def watch(self, prefix: str) -> StoreWatch:
        """Return a watch of all keys under a prefix, with its own thread.

        The call does not wait for the store, and does not fail while the store is unreachable: snapshots report this in
        `stale`.

        Args:
            prefix: The beginning of the keys.
        """
        self._check()
        return self._own(StoreWatch(self.follow(check_prefix(prefix))))

    def elect(self, name: str, value: bytes, ttl_s: float = 10.0) -> Election:
        """Campaign for a name in the background, until the election is closed. Does not wait for the store.

        Args:
            name: The name that the candidates compete for; must be a valid key.
            value: Tells others which candidate leads.
            ttl_s: Seconds after which another candidate may lead if the leader dies; the limits are those of
                `Store.lease`.

        Returns:
            The election, in which this process is a candidate from now on.
        """
        self._check()
        return self._own(Election(self, name, check_value(value), check_ttl(ttl_s)))

    # --- Implemented by a backend. Arguments are already checked; errors must be EDL's. ---

    @abc.abstractmethod
    def grant(self, ttl_s: float) -> Claim:
        """Return a new lease in the backend; after each renewal, it lasts `ttl_s` seconds.

        Args:
            ttl_s: Length of the lease in seconds.
        """

    @abc.abstractmethod
    def owns(self, claim: Claim) -> bool:
        """Return whether this store can use a claim.

        Args:
            claim: Granted by any store, possibly on a different server or in a different file.
        """

    @abc.abstractmethod
    def read(self, key: str) -> Entry | None:
        """Return a key's entry; None if the key does not exist.

        Args:
            key: The key.
        """

    @abc.abstractmethod
    def read_all(self, prefix: str) -> Sequence[Entry]:
        """Return all entries under a prefix, sorted by key.

        Args:
            prefix: The beginning of the keys.
        """

    @abc.abstractmethod
    def write(self, key: str, value: bytes, expected: int | None, claim: Claim | None) -> Entry | None:
        """Write a key.

        Args:
            key: The key.
            value: The key's new value.
            expected: The version that the key must have; 0 if the key must not exist, None for any version.
            claim: The lease that the key will belong to; None for no lease.

        Returns:
            The new entry; None if the key has a different version.

        Raises:
            ConflictError: Another claim holds the key.
            LeaseLostError: The claim has expired.
        """

    @abc.abstractmethod
    def remove(self, key: str, version: int | None) -> bool:
        """Delete a key.

        Args:
            key: The key.
            version: The version that the key must have; None for any version.

        Returns:
            Whether the key existed at that version, and was deleted.
        """

    def series(self) -> Iterable[tuple[str, Sequence[Mapping[str, float]]]]:
        """Read the metrics of the last hours, as recorded by an `edl store` process; other stores have no metrics.

        Returns:
            Names of series, each with its points, oldest first. A point maps fields to values; the field "t" is the
            wall clock time, and NaN means an unknown value.

        Raises:
            DiscoveryError: The store cannot be reached, or its server is older than this version of EDL.
        """
        return ()

    @abc.abstractmethod
    def follow(self, prefix: str) -> Follower[Entries]:
        """Return a follower of all keys under a prefix. Does not wait for the backend.

        Args:
            prefix: The beginning of the keys.
        """
