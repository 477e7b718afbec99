"""Follows a source without an end while a master leads."""

from __future__ import annotations

from edl.datasets import Dataset, Follower, FollowSettings
from edl.master.client import MasterClient
from edl.master.server import MasterServer
from edl.settings import Credentials

__all__ = ["StreamFollower"]

_TIMEOUT_S = 10.0  # for an answer of the master in this process, before the follower tries again


class StreamFollower:
    """A follower for the data set that a master was started with, if that grows.

    Args:
        master: in this process.
        name: of the data set.
        dataset: None for none.
        settings: of the follower.
        credentials: to call the master with.
    """

    def __init__(
        self,
        master: MasterServer,
        name: str,
        dataset: Dataset | None,
        settings: FollowSettings,
        credentials: Credentials,
    ) -> None:
        self._master = master
        self._name = name
        self._dataset = dataset if dataset is not None and dataset.grows else None
        self._settings = settings
        self._credentials = credentials
        self._client: MasterClient | None = None
        self._follower: Follower | None = None

    def check(self) -> None:
        """Follow while the master leads, and not while it stands by.

        Raises:
            EDLError: that ended the follower.
        """
        if self._dataset is None:
            return
        if not self._master.is_leader:
            self.close()
        elif self._follower is None:
            self._client = MasterClient(
                self._master.job,
                endpoint=self._master.endpoint,
                timeout_s=_TIMEOUT_S,
                credentials=self._credentials,
            )
            self._follower = Follower(self._client, self._name, self._dataset, self._settings)
            self._follower.start()
        elif self._follower.error is not None:
            raise self._follower.error

    def close(self) -> None:
        """Stop following."""
        client, self._client = self._client, None
        follower, self._follower = self._follower, None
        if client is not None:
            client.close()  # first: the follower may be in a call
        if follower is not None:
            follower.close()

    def __enter__(self) -> StreamFollower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
