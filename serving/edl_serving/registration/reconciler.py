"""Reconciles a registry with the instance that a process wants to show, in a thread.

Servers serve whether or not the registry answers, so no call here waits for the registry unless it says so.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from edl.backoff import Backoff
from edl.discovery import Instance, Registry, open_registry
from edl.discovery.registry import Registration
from edl.errors import DiscoveryError

__all__ = ["InstanceReconciler"]

_log = logging.getLogger(__name__)
_FIRST_RETRY_S = 0.25  # a registry that restarts is back within a second or two
_LAST_RETRY_S = 5.0  # half of the default TTL: a thousand teachers then ask 200 times a second


class InstanceReconciler:
    """Registers an instance, updates it, or deregisters it, and retries while the registry is away.

    Args:
        url: of the registry.
        ttl_s: after which others see an instance gone that is not renewed; see `Registry.register`.
        on_published: called in the thread with the instance, or None, that the registry shows now.

    Raises:
        SettingsError: the URL cannot be used.
    """

    def __init__(self, url: str, ttl_s: float, on_published: Callable[[Instance | None], None] | None = None) -> None:
        self._url = url
        self._ttl_s = ttl_s
        self._on_published = on_published
        self._changed = threading.Condition()
        self._desired: Instance | None = None
        self._published: Instance | None = None
        self._failure: Exception | None = None
        self._trouble = ""
        self._closing = False
        self._registration: Registration | None = None
        self._registry: Registry | None = None
        try:
            self._registry = open_registry(url)
        except DiscoveryError as exc:
            _log.warning("discovery at %s does not answer yet: %s", url, exc)
        # Not a `BackgroundLoop`, which goes on after errors: this thread ends with an error, and deregisters then.
        self._thread = threading.Thread(target=self._run, name="edl-reconciler", daemon=True)
        self._thread.start()

    @property
    def published(self) -> Instance | None:
        """The instance that the registry was last given; None for none."""
        return self._published

    @property
    def error(self) -> str:
        """Why the registry does not show the desired instance, or cannot renew it; empty if it does."""
        registration = self._registration
        if registration is not None and registration.error:
            return registration.error
        return "" if self._published == self._desired else self._trouble or "not told yet"

    def set_desired(self, instance: Instance | None) -> None:
        """Have the registry show an instance. Return at once.

        Args:
            instance: to show; None for none.
        """
        with self._changed:
            self._desired = instance
            self._changed.notify_all()

    def wait_until_current(self, timeout_s: float) -> bool:
        """Wait until the registry shows the desired instance.

        Args:
            timeout_s: how long to wait.

        Returns:
            Whether it does; False if `timeout_s` passed first.

        Raises:
            SettingsError: the registry cannot hold the instance.
            Exception: what else ended the thread.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._published == self._desired, timeout_s)
            if self._failure is not None:
                raise self._failure
            return self._published == self._desired

    def close(self, timeout_s: float = 5.0) -> None:
        """Deregister the instance and end the thread.

        Args:
            timeout_s: after which the thread is left behind, and the lease lapses instead.
        """
        with self._changed:
            self._desired = None
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("discovery does not answer; others see this teacher gone within %g s", self._ttl_s)

    def _run(self) -> None:
        try:
            while self._reconcile():
                pass
        except Exception as exc:  # noqa: BLE001 - raised again in `wait_until_current`
            _log.error("discovery: %s", exc, exc_info=_log.isEnabledFor(logging.DEBUG))
            with self._changed:
                self._failure = exc
                self._changed.notify_all()
        finally:
            if self._registration is not None:
                self._registration.close()
            if self._registry is not None:
                self._registry.close()

    def _reconcile(self) -> bool:
        """Wait for a change of the desired instance and publish it; return False when the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._published != self._desired)
            desired = self._desired
            if self._closing:
                return False
        backoff = Backoff(_FIRST_RETRY_S, _LAST_RETRY_S)
        while True:
            try:
                self._publish(desired)
                self._trouble = ""
                break
            except DiscoveryError as exc:
                self._trouble = str(exc)
                level = logging.DEBUG if backoff.failures else logging.WARNING
                _log.log(level, "discovery does not answer, and is asked again until it does: %s", exc)
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._desired != desired, backoff.next_wait_s())
                if self._closing or self._desired != desired:
                    return not self._closing
        if self._on_published is not None:
            self._on_published(desired)
        with self._changed:
            self._published = desired
            self._changed.notify_all()
        return True

    def _publish(self, desired: Instance | None) -> None:
        if self._registry is None:
            self._registry = open_registry(self._url)
        if desired is None:
            if self._registration is not None:
                self._registration.close()
                self._registration = None
        elif self._registration is None:
            _warn_of_a_namesake(self._registry, desired)
            self._registration = self._registry.register(desired, self._ttl_s)
        else:
            self._registration.update(desired)


def _warn_of_a_namesake(registry: Registry, desired: Instance) -> None:
    """Log a warning if another process has the instance's id.

    A process that starts again takes its own place over, which is meant; two live processes take turns, which is not.
    """
    for instance in registry.snapshot(desired.service).instances:
        if instance.id == desired.id and instance.endpoint != desired.endpoint:
            _log.warning(
                "%s/%s is registered at %s, and is replaced: if that teacher lives, give each an --id of its own",
                desired.service,
                desired.id,
                instance.endpoint,
            )
