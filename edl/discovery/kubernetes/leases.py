"""A lease on Kubernetes: a Lease object that its holder renews, and the keys that belong to it."""

from __future__ import annotations

import os
import platform
import time

from typing_extensions import override

from edl.discovery.common.renewal import Claim
from edl.discovery.kubernetes.api import KubernetesApi
from edl.discovery.kubernetes.naming import LeaseRef, build_lease, random_name, renewal_patch, version_of
from edl.errors import ConflictError
from edl.kube.resource_types import CONFIG_MAPS, LEASES

__all__ = ["LeaseClaim"]


class LeaseClaim(Claim):
    """A Lease object. Removing it is what ends the lease; `reaper` does that where the holder renews it no more.

    Args:
        api: of the store or registry, which closes it after its leases.
        ttl_s: seconds after the last renewal until it is over.
    """

    def __init__(self, api: KubernetesApi, ttl_s: float) -> None:
        self.api = api
        self._ttl_s = ttl_s
        self._renewals = 0
        self._keys: dict[str, str] = {}  # name of a key's ConfigMap -> its uid
        self.ref = LeaseRef("", "")
        self.since = 0

    def open(self) -> float:
        """Make the Lease, under a new name; returns a monotonic time before that."""
        asked = time.monotonic()
        holder = f"{platform.node()}/{os.getpid()}"
        name = random_name("lease")
        made = self.api.create(LEASES, build_lease(name, "lease", holder, self._ttl_s, self.api.pod))
        self.ref = LeaseRef(name, str(made["metadata"]["uid"]))
        self.since = version_of(made)
        return asked

    def add_key(self, name: str, uid: str) -> None:
        """Note that a key's ConfigMap belongs to this from now on."""
        self._keys[name] = uid

    @override
    def renew(self) -> bool:
        self._renewals += 1
        return self.api.patch(LEASES, self.ref.name, renewal_patch(self._renewals)) is not None

    @override
    def withdraw(self) -> None:
        # The keys first: a lease that is gone with keys left behind needs the reaper.
        for name, uid in list(self._keys.items()):
            try:
                self.api.delete(CONFIG_MAPS, name, uid=uid)
            except ConflictError:
                continue  # the key was deleted, and is another's now
        if self.ref.name:
            self.api.delete(LEASES, self.ref.name)
