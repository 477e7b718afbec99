"""Hosts that a job leaves out since a GPU of theirs failed: recorded in the Store, refused when they come again.

A host is known by its kernel's boot and by the GPUs that it shows this process: containers have other names at every
start, and a reboot, which resets the GPUs, makes another host of it. Keys: `jobs/JOB/left-out/HOST`, without a lease.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

from edl.collective.job_records import Exclusion, exclusions_prefix
from edl.discovery.store import Store

__all__ = ["REMEDY", "Exclusions", "host_key"]

REMEDY: Final = "once its GPU is reset or replaced, a reboot or `edl run --readmit` lets it join again"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_VISIBLE: Final = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def host_key() -> str:
    """Return the name of this boot of this host with the GPUs that are visible here: 16 hexadecimal digits."""
    visible = [os.environ.get(name, "") for name in _VISIBLE]
    return hashlib.sha256("\0".join([_BOOT_ID.read_text().strip(), *visible]).encode()).hexdigest()[:16]


class Exclusions:
    """The hosts that a job leaves out, seen from one of its hosts.

    Args:
        store: shared by all nodes; stays the caller's to close.
        job: its name.
        host: the key of this host, by `host_key`.
    """

    def __init__(self, store: Store, job: str, host: str) -> None:
        self._store = store
        self._folder = exclusions_prefix(job)
        self._key = self._folder + host

    def own_exclusion(self) -> Exclusion | None:
        """Return why the job leaves this host out; None if it does not.

        Raises:
            DiscoveryError: the store does not answer.
            ProtocolError: the record makes no sense.
        """
        entry = self._store.get(self._key)
        return None if entry is None else Exclusion.decode(entry.value)

    def find_same_elsewhere(self, exclusion: Exclusion) -> Exclusion | None:
        """Find another host that was left out for an unclear fault which the job has not come further than since.

        Then the fault has moved from host to host, as an error in a kernel of the script does.

        Args:
            exclusion: of this host, not yet recorded.

        Returns:
            The other host's record, None if there is none.

        Raises:
            DiscoveryError: the store does not answer.
            ProtocolError: a record makes no sense.
        """
        for entry in self._store.list(self._folder):
            other = Exclusion.decode(entry.value)
            if entry.key != self._key and not other.clear and exclusion.step <= other.step:
                return other
        return None

    def remove_unclear(self) -> None:
        """Readmit all hosts that were left out for an unclear fault: it turned out to be the script's.

        Raises:
            DiscoveryError: the store does not answer.
        """
        for entry in self._store.list(self._folder):
            if not Exclusion.decode(entry.value).clear:
                self._store.delete(entry.key)

    def add(self, exclusion: Exclusion) -> None:
        """Leave this host out from now on.

        Args:
            exclusion: why.

        Raises:
            DiscoveryError: the store does not answer.
        """
        self._store.put(self._key, exclusion.encode())

    def remove(self) -> None:
        """Readmit this host.

        Raises:
            DiscoveryError: the store does not answer.
        """
        self._store.delete(self._key)
