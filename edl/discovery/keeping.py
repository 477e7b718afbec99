"""Leases and registrations kept alive by a thread; what a claim is made of is the implementation's business."""

from __future__ import annotations

import abc
import logging
import threading
import time

from edl.discovery.owned import Background, Owned
from edl.discovery.records import validated
from edl.discovery.registry import Instance, Registration
from edl.discovery.store import Lease
from edl.errors import DiscoveryError, SettingsError

__all__ = ["Claim", "InstanceClaim", "KeptLease", "KeptRegistration"]

log = logging.getLogger("edl.discovery")

RENEWALS = 4
"""Renewals in the length of one lease: three may fail before it lapses."""
RETRY_S = 0.5
"""The longest wait before a failed renewal is tried again: a registry that restarts soon has everybody back."""


class Claim(abc.ABC):
    """Something that others see only as long as it is renewed. All methods may raise DiscoveryError."""

    @abc.abstractmethod
    def renew(self) -> bool:
        """Renew; False if it has lapsed."""

    @abc.abstractmethod
    def withdraw(self) -> None:
        """Give it up now rather than when it lapses, and release what this object holds. Called once."""


class InstanceClaim(Claim):
    """The claim of a registered instance; unlike a lease's it can be made again after it lapsed."""

    @abc.abstractmethod
    def announce(self, instance: Instance) -> None:
        """Make others see `instance`, in place of what this claim showed before."""


class KeptLease(Owned, Lease):
    """A lease over a claim that has just been made.

    Args:
        granted: the monotonic time *before* the claim was asked for, so that this side sees it expire first.
    """

    def __init__(self, claim: Claim, ttl_s: float, granted: float) -> None:
        super().__init__()
        self.claim = claim
        self._ttl_s = ttl_s
        self._expires = granted + ttl_s
        self._forfeited = False
        self._own(Background("edl-lease", self._renew))

    @property
    def lost(self) -> bool:
        if not self._closed:
            self._check()
        # The clock is asked each time: in a process that was paused, the thread may not have noticed yet.
        if self._closed or time.monotonic() >= self._expires:
            self._forfeited = True
        return self._forfeited

    def forfeit(self) -> None:
        """The store says that the lease is gone."""
        self._forfeited = True

    def _renew(self) -> float | None:
        if self.lost:
            return None
        asked = time.monotonic()
        try:
            if not self.claim.renew():
                self._forfeited = True
                log.warning("a lease of %g s has expired", self._ttl_s)
                return None
        except DiscoveryError as exc:
            log.debug("a lease of %g s could not be renewed: %s", self._ttl_s, exc)
            return min(self._ttl_s / RENEWALS / 2, RETRY_S)
        if not self.lost:
            self._expires = asked + self._ttl_s
        return self._ttl_s / RENEWALS

    def _release(self) -> None:
        try:
            self.claim.withdraw()
        except DiscoveryError as exc:
            log.warning("a lease could not be given up, it expires within %g s: %s", self._ttl_s, exc)


class KeptRegistration(Owned, Registration):
    """A registration over a claim; the first announcement is made here, so that a registry that is away is an error."""

    def __init__(self, claim: InstanceClaim, instance: Instance, ttl_s: float) -> None:
        super().__init__()
        self._claim = claim
        self._ttl_s = ttl_s
        self._instance = instance
        self._error = ""
        self._turn = threading.Lock()  # announcing and renewing must not overtake one another
        self._announced = False
        self._announce()
        self._own(Background("edl-registration", self._renew))

    @property
    def instance(self) -> Instance:
        return self._instance

    @property
    def error(self) -> str:
        return self._error

    def update(self, instance: Instance) -> None:
        """Replace what is registered. On a DiscoveryError the new values are kept, and announced as soon as possible.

        Raises:
            SettingsError: another service or id, or values that no registry could hand out.
            DiscoveryError: the registry could not be reached.
        """
        self._check()
        instance = validated(instance)
        if (instance.service, instance.id) != (self._instance.service, self._instance.id):
            raise SettingsError(
                f"a registration keeps its service and id: {self._instance.service}/{self._instance.id} cannot become"
                f" {instance.service}/{instance.id}"
            )
        with self._turn:
            self._instance = instance
            self._announced = False
            self._announce()

    def _announce(self) -> None:
        self._claim.announce(self._instance)
        self._announced = True

    def _renew(self) -> float:
        try:
            with self._turn:
                if not (self._announced and self._claim.renew()):
                    self._announced = False
                    self._announce()
        except DiscoveryError as exc:
            if not self._error:
                log.warning("%s/%s cannot be kept registered: %s", self._instance.service, self._instance.id, exc)
            self._error = str(exc)
            return min(self._ttl_s / RENEWALS / 2, RETRY_S)
        if self._error:
            log.info("%s/%s is registered again", self._instance.service, self._instance.id)
            self._error = ""
        return self._ttl_s / RENEWALS

    def _release(self) -> None:
        try:
            with self._turn:
                self._claim.withdraw()
        except DiscoveryError as exc:
            log.warning(
                "%s/%s could not be deregistered, it lapses within %g s: %s",
                self._instance.service,
                self._instance.id,
                self._ttl_s,
                exc,
            )
