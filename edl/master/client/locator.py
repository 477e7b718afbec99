"""Where a job's master is: a fixed endpoint, or what the leading master has put into the Store."""

from __future__ import annotations

import json
from typing import Any, Final

from edl.discovery import Store
from edl.errors import DiscoveryError, NoMasterError
from edl.master.naming import election_key
from edl.master.reports import read_report

__all__ = ["Locator"]


class Locator:
    """Finds the master. Asks the Store each time; an endpoint that answered stays known while the Store is away.

    Args:
        job: its name.
        store: None where the endpoint is given.
        endpoint: None where the Store says it.
    """

    def __init__(self, job: str, store: Store | None, endpoint: str | None) -> None:
        self._job: Final = job
        self._store = store
        self._endpoint = endpoint
        self._known = endpoint

    def find(self) -> str:
        """Return where the master leads.

        Raises:
            NoMasterError: there is none, or the Store does not answer and none was known.
        """
        if self._store is None:
            assert self._endpoint is not None
            return self._endpoint
        try:
            entry = self._store.get(election_key(self._job))
        except DiscoveryError as exc:
            if self._known is None:
                raise NoMasterError(f"where it is cannot be asked: {exc}") from exc
            return self._known
        if entry is None:
            raise NoMasterError("none leads")
        try:
            self._known = str(json.loads(entry.value)["endpoint"])
        except (ValueError, TypeError, KeyError) as exc:
            raise NoMasterError(f"the Store has nonsense at {election_key(self._job)}") from exc
        return self._known

    def last_report(self) -> dict[str, Any] | None:
        """Return the last report of a master that has ended since all was done; None where there is another to come."""
        if self._store is None:
            return None
        try:
            report = read_report(self._store, self._job)
            if report is None or report.get("state") != "done" or self._store.get(election_key(self._job)) is not None:
                return None
        except DiscoveryError:
            return None
        return report
