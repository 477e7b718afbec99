"""Keeps discovery in line with what a process wants it to say, from a thread of its own.

Teachers must serve whether or not the registry answers, so nothing here makes the server wait for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from edl.discovery import Instance, Registry, open_registry
from edl.discovery.registry import Registration
from edl.errors import DiscoveryError

__all__ = ["Announcer"]

_log = logging.getLogger(__name__)
_FIRST_RETRY_S, _LAST_RETRY_S = 0.25, 5.0


class Announcer:
    """Registers one instance, changes it, or takes it back, as wanted last. Retries while the registry is away.

    Args:
        url: of the registry.
        ttl_s: see `Registry.register`.
        on_shown: called in the thread when discovery has come to say what is wanted.

    Raises:
        SettingsError: the URL cannot be used.
    """

    def __init__(self, url: str, ttl_s: float, on_shown: Callable[[Instance | None], None] | None = None) -> None:
        self._url = url
        self._ttl_s = ttl_s
        self._on_shown = on_shown
        self._changed = threading.Condition()
        self._wanted: Instance | None = None
        self._shown: Instance | None = None
        self._failure: Exception | None = None
        self._trouble = ""
        self._closing = False
        self._registration: Registration | None = None
        self._registry: Registry | None = None
        try:
            self._registry = open_registry(url)
        except DiscoveryError as exc:
            _log.warning("discovery at %s does not answer yet: %s", url, exc)
        self._thread = threading.Thread(target=self._run, name="edl-announcer", daemon=True)
        self._thread.start()

    @property
    def shown(self) -> Instance | None:
        """What discovery was last told."""
        return self._shown

    @property
    def error(self) -> str:
        """Why discovery does not say what is wanted, or cannot be kept to it; empty while all is well."""
        registration = self._registration
        if registration is not None and registration.error:
            return registration.error
        return "" if self._shown == self._wanted else self._trouble or "not told yet"

    def want(self, instance: Instance | None) -> None:
        """Let discovery say `instance`, or nothing. Returns at once."""
        with self._changed:
            self._wanted = instance
            self._changed.notify_all()

    def settle(self, timeout_s: float) -> bool:
        """Wait until discovery says what is wanted; False if `timeout_s` passed first.

        Raises:
            SettingsError: the registry cannot hold such an instance.
            Exception: whatever else ended the thread.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._shown == self._wanted, timeout_s)
            if self._failure is not None:
                raise self._failure
            return self._shown == self._wanted

    def close(self, timeout_s: float = 5.0) -> None:
        """Take the instance back and end the thread; gives up after `timeout_s`, and the lease lapses instead."""
        with self._changed:
            self._wanted = None
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("discovery does not answer; others see this teacher gone within %g s", self._ttl_s)

    def _run(self) -> None:
        try:
            while self._reconcile():
                pass
        except Exception as exc:  # noqa: BLE001 - raised again in `settle`
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
        """Wait for a wish and fulfil it; False when it is time to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._shown != self._wanted)
            wanted = self._wanted
            if self._closing:
                return False
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                self._show(wanted)
                self._trouble = ""
                break
            except DiscoveryError as exc:
                self._trouble = str(exc)
                level = logging.WARNING if retry_s == _FIRST_RETRY_S else logging.DEBUG
                _log.log(level, "discovery does not answer, and is asked again until it does: %s", exc)
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._wanted != wanted, retry_s)
                if self._closing or self._wanted != wanted:
                    return not self._closing
            retry_s = min(2 * retry_s, _LAST_RETRY_S)
        if self._on_shown is not None:
            self._on_shown(wanted)
        with self._changed:
            self._shown = wanted
            self._changed.notify_all()
        return True

    def _show(self, wanted: Instance | None) -> None:
        if self._registry is None:
            self._registry = open_registry(self._url)
        if wanted is None:
            if self._registration is not None:
                self._registration.close()
                self._registration = None
        elif self._registration is None:
            _warn_of_a_namesake(self._registry, wanted)
            self._registration = self._registry.register(wanted, self._ttl_s)
        else:
            self._registration.update(wanted)


def _warn_of_a_namesake(registry: Registry, wanted: Instance) -> None:
    """A process that starts again takes its old place over, which is meant; two that live take turns, which is not."""
    for instance in registry.snapshot(wanted.service).instances:
        if instance.id == wanted.id and instance.endpoint != wanted.endpoint:
            _log.warning(
                "%s/%s is registered at %s, and is replaced: if that teacher lives, give each an --id of its own",
                wanted.service,
                wanted.id,
                instance.endpoint,
            )
