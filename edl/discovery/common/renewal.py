"""Leases and registrations kept alive by a thread; what a claim is made of is the implementation's business."""

from __future__ import annotations

import abc
import logging
import math
import time
from collections import deque
from dataclasses import dataclass

from typing_extensions import override

from edl.background import BackgroundLoop
from edl.discovery.common.resource import Resource
from edl.discovery.records import validated
from edl.discovery.registry import Instance, Registration
from edl.discovery.store import Lease
from edl.errors import ClosedError, DiscoveryError, SettingsError
from edl.notifier import Notifier

__all__ = ["Claim", "InstanceClaim", "RenewedLease", "RenewedRegistration"]

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


class RenewedLease(Resource, Lease):
    """A lease over a claim that has just been made.

    Args:
        granted: the monotonic time *before* the claim was asked for, so that this side sees it expire first.
    """

    def __init__(self, claim: Claim, ttl_s: float, granted: float) -> None:
        super().__init__()
        self.claim = claim
        self._ttl_s = ttl_s
        self._expires = granted + ttl_s
        self._late_at = -math.inf
        self._forfeited = False
        self._begun = False
        self._own(BackgroundLoop("edl-lease", self._step))

    @property
    @override
    def lost(self) -> bool:
        if not self._closed:
            self._check_process()
        # The clock is asked each time: in a process that was paused, the thread may not have noticed yet.
        if self._closed or time.monotonic() >= self._expires:
            self._forfeited = True
        return self._forfeited

    @property
    @override
    def late_at(self) -> float:
        self._record_lateness()
        return self._late_at

    def forfeit(self) -> None:
        """Note that the store says that the lease is gone."""
        self._forfeited = True

    def _record_lateness(self) -> None:
        now = time.monotonic()
        if now > self._expires - self._ttl_s / 2:
            self._late_at = now

    def _step(self) -> float | None:
        if not self._begun:  # it has just been granted
            self._begun = True
            return self._ttl_s / RENEWALS
        return self._renew()

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
            self._record_lateness()
            self._expires = asked + self._ttl_s
        return self._ttl_s / RENEWALS

    def _release(self) -> None:
        try:
            self.claim.withdraw()
        except (DiscoveryError, ClosedError) as exc:  # another thread may close the store at this moment
            log.warning("a lease could not be given up, it expires within %g s: %s", self._ttl_s, exc)


@dataclass(eq=False)
class _Update:
    """An announcement that a caller of `update` waits for."""

    instance: Instance
    done: bool = False
    failure: Exception | None = None


class RenewedRegistration(Resource, Registration):
    """A registration over a claim; the first announcement is made here, so that a registry that is away is an error.

    From then on the claim is for a single thread, which renews it and announces what `update` is given: they must not
    overtake each other, and with a lock, a signal handler that closes this in the middle of `update` would wait for
    its own thread. When that thread has ended, the claim is withdrawn.
    """

    def __init__(self, claim: InstanceClaim, instance: Instance, ttl_s: float) -> None:
        super().__init__()
        self._claim = claim
        self._ttl_s = ttl_s
        self._instance = instance
        self._error = ""
        self._updates: deque[_Update] = deque()
        self._updated = Notifier()
        self._announced = False
        self._kept_until = 0.0  # monotonic: by then at the latest it lapses, as far as is known here
        self._renew_at = time.monotonic() + ttl_s / RENEWALS
        self._begun = False
        self._announce()
        self._background = self._own(BackgroundLoop("edl-registration", self._step))

    @property
    @override
    def instance(self) -> Instance:
        return self._instance

    @property
    @override
    def error(self) -> str:
        # The clock is asked each time: a renewal may hang for longer than the lease, or the process have been paused.
        if not self._error and not self._closed and time.monotonic() >= self._kept_until:
            return f"its lease of {self._ttl_s:g} s is over: a renewal takes longer than that"
        return self._error

    def update(self, instance: Instance) -> None:
        """Replace what is registered. On a DiscoveryError the new values are kept, and announced as soon as possible.

        Raises:
            SettingsError: another service or id, or values that no registry could hand out.
            DiscoveryError: the registry could not be reached.
            ClosedError: this is closed, or was closed during the call.
        """
        self._check()
        instance = validated(instance)
        if (instance.service, instance.id) != (self._instance.service, self._instance.id):
            raise SettingsError(
                f"a registration keeps its service and id: {self._instance.service}/{self._instance.id} cannot become"
                f" {instance.service}/{instance.id}"
            )
        update = _Update(instance)
        self._updates.append(update)
        self._background.wake()
        self._updated.wait_for(lambda: update.done or self._closed)
        if not update.done:
            self._check()
        if update.failure is not None:
            try:
                raise update.failure
            finally:
                del update  # this frame, which the error's traceback holds, would hold the error

    def _announce(self) -> None:
        asked = time.monotonic()
        self._claim.announce(self._instance)
        self._announced = True
        self._kept_until = asked + self._ttl_s

    def _step(self) -> float:
        if not self._updates:
            if not self._begun:  # it has just been announced
                self._begun = True
                return self._ttl_s / RENEWALS
            return self._renew()
        self._begun = True
        self._take_updates()
        if not self._announced:
            return min(self._ttl_s / RENEWALS / 2, RETRY_S)
        # An announcement need not renew the lease, and updates may come more often than renewals are due.
        due_s = self._renew_at - time.monotonic()
        return due_s if due_s > 0 and not self._error else self._renew()

    def _take_updates(self) -> None:
        while self._updates:
            update = self._updates.popleft()
            self._instance = update.instance
            self._announced = False
            try:
                self._announce()
            except Exception as exc:  # noqa: BLE001 - raised again where it is waited for
                update.failure = exc
            update.done = True
            self._updated.notify()

    def _renew(self) -> float:
        asked = time.monotonic()
        try:
            if self._announced and self._claim.renew():
                self._kept_until = asked + self._ttl_s
            else:
                self._announced = False
                self._announce()
        except DiscoveryError as exc:
            if not self._error:
                log.warning(
                    "%s/%s cannot be kept registered: %s. Students that are connected stay; from %g s after the last"
                    " renewal on, its registration counts as lapsed. Tried again until it works",
                    self._instance.service,
                    self._instance.id,
                    exc,
                    self._ttl_s,
                )
            self._error = str(exc)
            return min(self._ttl_s / RENEWALS / 2, RETRY_S)
        if self._error:
            log.info("%s/%s is registered again", self._instance.service, self._instance.id)
            self._error = ""
        self._renew_at = asked + self._ttl_s / RENEWALS
        return self._ttl_s / RENEWALS

    def _halt(self) -> None:
        self._updated.notify()

    def _release(self) -> None:
        try:
            self._claim.withdraw()
        except (DiscoveryError, ClosedError) as exc:  # another thread may close the registry at this moment
            log.warning(
                "%s/%s could not be deregistered, it lapses within %g s: %s",
                self._instance.service,
                self._instance.id,
                self._ttl_s,
                exc,
            )
