"""A `torch.distributed.Store` over EDL's: where torchrun's agents exchange ranks and the first rank's address."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from urllib.parse import quote, unquote

from torch.distributed import DistStoreError
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]

from edl.discovery.store import Store
from edl.errors import DiscoveryError

__all__ = ["SharedStore"]


class SharedStore(TorchStore):
    """Keys of torch's under a prefix of ours.

    torch calls the methods from C++ as well, where a store is wrapped in its `PrefixStore`; it passes and wants bytes
    then. All keys are read over the network every time: this is for the control plane, not for tensors.

    Waiting lasts at most torch's timeout (`set_timeout`), and raises torch's `DistStoreError` then. Other errors are
    as of `edl.discovery.Store`.

    Args:
        store: shared by all agents; stays the caller's to close.
        prefix: of all keys, ends with a slash.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        super().__init__()
        self._store = store
        self._prefix = prefix

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key to a value."""
        self._store.put(self._own(key), _bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of a key, as soon as it is set."""
        self.wait([key])
        entry = self._store.get(self._own(key))
        if entry is None:
            raise DistStoreError(f"key {key!r} was deleted while its value was read")
        return entry.value

    def add(self, key: str, value: int) -> int:
        """Add to a key that counts, from 0 if it is not there. Returns the sum."""
        own = self._own(key)
        while True:
            entry = self._store.get(own)
            total = value if entry is None else int(entry.value) + value
            if self._store.compare_and_set(own, str(total).encode(), None if entry is None else entry.version):
                return total

    def append(self, key: str, value: bytes | str) -> None:
        """Append to a key's value."""
        own = self._own(key)
        while True:
            entry = self._store.get(own)
            whole = _bytes(value) if entry is None else entry.value + _bytes(value)
            if self._store.compare_and_set(own, whole, None if entry is None else entry.version):
                return

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        """Set a key if it has the expected value; an absent key if nothing is expected.

        Returns:
            The value that the key has then; of a key that is not there and was expected to be, the expected value.
        """
        own, expected, desired = self._own(key), _bytes(expected_value), _bytes(desired_value)
        while True:
            entry = self._store.get(own)
            if entry is None and expected:
                return expected
            if entry is not None and entry.value != expected:
                return entry.value
            if self._store.compare_and_set(own, desired, None if entry is None else entry.version):
                return desired

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return all(self._store.get(self._own(key)) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            DistStoreError: they were not in time.
        """
        patience: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        deadline = time.monotonic() + patience.total_seconds()
        for key in keys:
            self._wait_for(key, deadline, patience)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys, as soon as all are set."""
        self.wait(keys)
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Set several keys, in order."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        """Delete a key. Returns whether it was there."""
        return self._store.delete(self._own(key))

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return len(self._store.list(self._prefix))

    def list_keys(self) -> list[str]:
        """Return all keys."""
        return [unquote(entry.key[len(self._prefix) + 1 :]) for entry in self._store.list(self._prefix)]

    def has_extended_api(self) -> bool:
        """Return whether `append`, `multi_get` and `multi_set` are there."""
        return True

    # By these names torch's C++ calls two of the methods.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _own(self, key: str) -> str:
        # torch's keys may begin with a slash or have empty parts, which ours must not.
        return f"{self._prefix}={quote(key, safe='')}"

    def _wait_for(self, key: str, deadline: float, patience: timedelta) -> None:
        own = self._own(key)
        if self._store.get(own) is not None:
            return
        with self._store.watch(own) as watch:
            stale = ""
            while (left := deadline - time.monotonic()) > 0:
                snapshot = watch.get(left)
                if snapshot is not None and own in snapshot.entries:
                    return
                stale = snapshot.stale if snapshot is not None else stale
        if stale:
            raise DiscoveryError(f"waiting for key {key!r}: {stale}")
        raise DistStoreError(f"key {key!r} was not set within {patience.total_seconds():g} s")


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
