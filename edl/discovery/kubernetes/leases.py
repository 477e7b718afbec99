"""A lease on Kubernetes: a Lease object that its holder renews, and the keys that belong to it."""

from __future__ import annotations

import os
import platform
import time

from typing_extensions import override

from edl.discovery.common.renewal import Claim
from edl.discovery.kubernetes.api import KubernetesApi
from edl.discovery.kubernetes.naming import (
    LeaseRef,
    build_lease,
    lease_ref_of,
    random_name,
    renewal_patch,
    version_of,
)
from edl.discovery.kubernetes.target import KubernetesTarget
from edl.errors import ConflictError
from edl.kube.resource_types import CONFIG_MAPS, LEASES

__all__ = ["LeaseClaim", "LeaseObject"]

_DELETIONS = 5
"""Of a key that changes meanwhile; who removes the keys of leases that are gone does the rest."""


class LeaseObject:
    """A Lease object. Removing it is what ends the lease; `reaper` does that where the holder renews it no more.

    Args:
        api: to ask with.
        ttl_s: seconds after the last renewal until it is over.
    """

    def __init__(self, api: KubernetesApi, ttl_s: float) -> None:
        self._api = api
        self._ttl_s = ttl_s
        self._renewals = 0
        self.ref = LeaseRef("", "")
        self.since = 0

    def create(self) -> float:
        """Make the object, under a new name; returns a monotonic time before that."""
        asked = time.monotonic()
        holder = f"{platform.node()}/{os.getpid()}"
        name = random_name("lease")
        made = self._api.create(LEASES, build_lease(name, "lease", holder, self._ttl_s, self._api.pod))
        self.ref = LeaseRef(name, str(made["metadata"]["uid"]))
        self.since = version_of(made)
        return asked

    def renew(self) -> bool:
        """Renew it; False where it is gone."""
        self._renewals += 1
        return self._api.patch(LEASES, self.ref.name, renewal_patch(self._renewals)) is not None

    def remove(self) -> None:
        """End it now."""
        if self.ref.name:
            self._api.delete(LEASES, self.ref.name)


class LeaseClaim(Claim):
    """A store's lease, and the keys that belong to it.

    Its connection is its own: the store may be closed while the lease is made.
    """

    def __init__(self, target: KubernetesTarget, ttl_s: float) -> None:
        self.api = KubernetesApi(target)
        self._lease = LeaseObject(self.api, ttl_s)
        self._keys: dict[str, int] = {}  # name of a key's ConfigMap -> the version written last

    @property
    def ref(self) -> LeaseRef:
        """What keys name."""
        return self._lease.ref

    def open(self) -> float:
        """Make the lease; returns a monotonic time before that."""
        return self._lease.create()

    def add_key(self, name: str, version: int) -> None:
        """Note that a key's ConfigMap belongs to this from now on, at this version."""
        self._keys[name] = version

    @override
    def renew(self) -> bool:
        return self._lease.renew()

    @override
    def withdraw(self) -> None:
        try:
            # The keys first: a lease that is gone with keys left behind needs the reaper.
            for name, version in list(self._keys.items()):
                self._delete_key(name, version)
            self._lease.remove()
        finally:
            self.api.close()

    def _delete_key(self, name: str, version: int) -> None:
        """Delete a key that is still this lease's.

        Who takes over the key of a lease that is gone writes the same object, whose uid stays: the version tells.
        """
        for _ in range(_DELETIONS):
            try:
                self.api.delete(CONFIG_MAPS, name, resource_version=str(version))
                return
            except ConflictError:
                found = self.api.get(CONFIG_MAPS, name)
                if found is None or lease_ref_of(found) != self.ref:
                    return
                version = version_of(found)  # a write of this lease's own whose answer did not arrive
