"""The name of a job's run, which its agents agree on in the job's Store."""

from __future__ import annotations

import re

from edl.collective.checkpoint.storage.manifest import new_run_id, run_name
from edl.collective.job_records import prefix
from edl.discovery.store import Store
from edl.errors import DiscoveryError, ProtocolError

__all__ = ["JobRun"]


class JobRun:
    """Names the job's run in its checkpoints (`edl.collective.checkpoint.storage.manifest`).

    The name lasts as long as the job's records in the Store: a job that is stopped and started again there goes on
    counting generations, so it is the same run.

    Args:
        store: of the job.
        job: the name of the job.
    """

    def __init__(self, store: Store, job: str) -> None:
        self._store = store
        self._key = prefix(job) + "run"
        self._known = ""

    def __call__(self) -> str:
        """Return the name, which the first agent that asks makes.

        Raises:
            DiscoveryError: the store does not answer.
            ProtocolError: the record in the store is not the name of a run.
        """
        entry = self._store.get(self._key)
        if entry is None:  # not yet; or the store has lost it, and then it is to be as it was
            name = self._known or run_name(new_run_id())
            self._store.compare_and_set(self._key, name.encode(), None)
            entry = self._store.get(self._key)
        if entry is None:
            raise DiscoveryError(f"the store forgot {self._key} as soon as it was written")
        if re.fullmatch(rb"[0-9a-f]{16}", entry.value) is None:
            raise ProtocolError(f"{self._key} in the store is not the name of a run: remove it")
        self._known = entry.value.decode()
        return self._known
