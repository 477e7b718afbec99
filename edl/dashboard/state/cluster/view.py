"""The cluster as the page looks at it: seldom enough for the API server, and without ever ending the page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from edl.dashboard.state.cluster.reader import ClusterReader
from edl.dashboard.state.cluster.schema import KubernetesStatus
from edl.kube.client import KubeClient
from edl.kube.settings import KubeSettings

__all__ = ["ClusterView"]

_MAX_JOBS: Final = 100
"""On the page, as of jobs of a Store."""
_EVERY_S: Final = 2.0
"""Between two looks, of three lists a namespace, for each namespace: the operator changes a status about as often."""
_AWAY_S: Final = 10.0
"""After a look without an answer, which may have taken its timeout, and held up the rest of the page."""
_SHARE: Final = 0.2
"""Of the time that looks may take: a cluster of thousands of jobs is looked at less often."""


class ClusterView:
    """Jobs and pools of some namespaces, as new as a page needs them. Not thread-safe.

    Args:
        settings: which cluster.
        namespaces: to look in, of which an empty one is that of the settings; none for that alone.

    Raises:
        SettingsError: no cluster is named anywhere, or the file that names it cannot be used.
    """

    def __init__(self, settings: KubeSettings, namespaces: Sequence[str] = ()) -> None:
        self._client = KubeClient(settings)
        places = tuple(dict.fromkeys(name or self._client.namespace for name in namespaces or ("",)))
        self._reader = ClusterReader(self._client, places, members=True, max_jobs=_MAX_JOBS)
        self._last = KubernetesStatus(places)
        self._every_s = min(_EVERY_S * len(places), _AWAY_S)
        self._next = 0.0

    def read(self) -> KubernetesStatus:
        """Return what is there; with `stale` set, and otherwise as known last, where the API server does not say."""
        began = time.monotonic()
        if began >= self._next:
            self._last = self._reader.read_again()
            took_s = time.monotonic() - began
            every_s = _AWAY_S if self._last.stale else self._every_s
            self._next = began + took_s + max(every_s - took_s, took_s * (1.0 / _SHARE - 1.0))
        return self._last

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
