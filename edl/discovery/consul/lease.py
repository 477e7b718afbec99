"""A lease on Consul: a session that hangs on the TTL check of a small service of its own."""

from __future__ import annotations

import secrets
import time

from typing_extensions import override

from edl.discovery.common.renewal import Claim
from edl.discovery.consul.client import ConsulClient
from edl.discovery.consul.registry import LEASE_SERVICE
from edl.discovery.consul.target import ConsulTarget
from edl.errors import DiscoveryError

__all__ = ["SessionClaim"]


class SessionClaim(Claim):
    """A session, and the service `edl-lease` whose check ends it.

    The check belongs to a service since a check of the node itself would, when it fails, declare every service of that
    node dead.
    """

    def __init__(self, target: ConsulTarget, ttl_s: float) -> None:
        self._client = ConsulClient(target)
        self._ttl_s = ttl_s
        self._service_id = f"{LEASE_SERVICE}-{secrets.token_hex(8)}"
        self.session = ""

    def open(self) -> float:
        """Make the session; returns a monotonic time before it was last confirmed."""
        deadline = time.monotonic() + self._client.target.timeout_s
        while True:
            self._client.register_service(LEASE_SERVICE, self._service_id, self._ttl_s)
            try:
                self.session = self._client.create_session(self._service_id, self._ttl_s)
                confirmed = time.monotonic()
                if self.renew():
                    return confirmed
            except DiscoveryError:
                # The servers hear of the check a moment after the agent; on a busy machine it may lapse before that.
                if time.monotonic() > deadline:
                    raise
            if time.monotonic() > deadline:
                raise DiscoveryError(f"{self._client.target}: a lease of {self._ttl_s} s lapsed while it was made")
            time.sleep(0.05)

    @override
    def renew(self) -> bool:
        # In this order: an agent that has lost the service has ended the session, which the second call finds out.
        return self._client.renew_service(self._service_id) and self._client.renew_session(self.session)

    @override
    def withdraw(self) -> None:
        try:
            if self.session:
                self._client.destroy_session(self.session)
            self._client.deregister_service(self._service_id)
        finally:
            self._client.close()
