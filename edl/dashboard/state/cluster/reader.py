"""Asks the API of a cluster for its jobs and pools.

What does not belong here: how often (`edl.dashboard.state.reader`, and commands).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from edl.dashboard.state.cluster.decoding import decode_workload, sort_workloads
from edl.dashboard.state.cluster.schema import KubernetesStatus
from edl.errors import EDLError
from edl.kube.client import KubeClient
from edl.kube.objects import Object
from edl.kube.resource_types import ELASTIC_JOBS, PODS, TEACHER_POOLS, ResourceType
from edl.master.kube.members.naming import MANAGED_BY
from edl.quoting import shown

__all__ = ["ClusterReader"]

MAX_JOBS: Final = 500
"""Those that go on and those that ended last: a cluster keeps them until they are deleted."""
_PODS: Final = "=".join(MANAGED_BY)


class ClusterReader:
    """Reads jobs and pools, again and again. Not thread-safe.

    Args:
        client: of the cluster; stays the caller's to close.
        namespaces: to look in; empty for all.
        members: read pods as well, and so say what members do.
        max_jobs: of those that ended, the older ones are left out.
    """

    def __init__(
        self, client: KubeClient, namespaces: Sequence[str], *, members: bool = False, max_jobs: int = MAX_JOBS
    ) -> None:
        self._client = client
        self._namespaces = tuple(namespaces)
        self._members = members
        self._max_jobs = max_jobs
        self._last = KubernetesStatus(self._namespaces)

    def read(self) -> KubernetesStatus:
        """Ask for all.

        Raises:
            EDLError: the API server does not answer, or refuses.
        """
        jobs = self._list(ELASTIC_JOBS)
        pools = self._list(TEACHER_POOLS)
        pods = self._list(PODS, _PODS) if self._members else None
        found = sort_workloads(decode_workload("job", job, pods) for job in jobs)
        self._last = KubernetesStatus(
            namespaces=self._namespaces,
            looked=time.time(),
            jobs=tuple(found[: self._max_jobs]),
            pools=tuple(sort_workloads(decode_workload("pool", pool, pods) for pool in pools)),
            more_jobs=max(0, len(found) - self._max_jobs),
        )
        return self._last

    def _list(self, kind: ResourceType, labels: str = "") -> list[Object]:
        places = self._namespaces or ("",)
        return [item for place in places for item in self._client.list(kind, place, label_selector=labels).items]

    def read_again(self) -> KubernetesStatus:
        """Ask for all; where that cannot be, return what was known last, with `stale` set."""
        try:
            return self.read()
        except EDLError as exc:
            self._last = replace(self._last, stale=f"as known last: {shown(exc)}")
            return self._last
