"""The registration of a teacher server: its instance in discovery, and its ready file."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edl.discovery import Instance
from edl.protocol import names
from edl_serving.registration.address import warn_of_loopback
from edl_serving.registration.load import TeacherCounts, TeacherLoad
from edl_serving.registration.ready_file import ReadyFile
from edl_serving.registration.reconciler import InstanceReconciler
from edl_serving.registration.settings import RegistrationSettings

if TYPE_CHECKING:
    from edl_serving.server import TeacherServer

__all__ = ["TeacherRegistration"]

_log = logging.getLogger(__name__)

_WITHDRAW_TIMEOUT_S = 2.0
"""For a registry that may be away to take a change: longer would delay the end of a drain, which the lease replaces."""

_REGISTER_TIMEOUT_S = 10.0
"""For a registry to refuse an instance that it cannot hold: a registry of another continent answers within this."""


class TeacherRegistration:
    """Keeps a teacher in discovery from `register` until `start_draining`, and only while its model is healthy.

    Args:
        settings: how the teacher shows; without a URL only the ready file is written.
        address: host name or address at which students reach the server.
        linger_s: how long to wait after the teacher shows as draining, so that students hear of it.
        ready_file: the file that says that the teacher is ready.

    Attributes:
        version: of the model; to be set before `register`. Empty if unknown.
    """

    def __init__(self, settings: RegistrationSettings, address: str, linger_s: float, ready_file: ReadyFile) -> None:
        self.version = ""
        self._settings = settings
        self._address = address
        self._linger_s = linger_s
        self._ready_file = ready_file
        self._instance: Instance | None = None
        self._metrics_port: int | None = None
        self._drain_timeout_s = 0.0
        self._reconciler: InstanceReconciler | None = None
        self._lock = threading.Lock()  # between the event loop, which reports health, and the threads of the callers
        self._healthy = True
        self._draining = False
        self._was_published = False
        self._load: TeacherLoad | None = None
        if settings.url is not None:
            self._reconciler = InstanceReconciler(settings.url, settings.ttl_s, self._on_published)
            self._load = TeacherLoad(settings.url, settings.service, settings.load)

    def register(self, server: TeacherServer) -> None:
        """Enter discovery; the reconciler tries again in the background while the registry is away.

        Args:
            server: the server, which is ready.

        Raises:
            SettingsError: the registry cannot hold the instance.
        """
        self._metrics_port = server.metrics_port
        self._drain_timeout_s = server.settings.drain_timeout_s
        model = server.settings.model
        self._instance = self._settings.instance(self._address, server.port, model, self._metadata(server))
        server.watch_ready(self._on_health_change)
        # In place of the check that `serve` has until this returns: the ready file may be there before.
        unregistered = "" if self._reconciler is None else "not registered yet"
        server.metrics.probes.add_check("/readyz", "discovery", lambda: "" if self._was_published else unregistered)
        if self._reconciler is None:
            with self._lock:
                self._write_ready_file(self._instance)
            return
        reconciler = self._reconciler
        server.metrics.add_gauge(
            "edl_teacher_registered",
            "Whether discovery has this teacher, and its lease is kept.",
            lambda: float(reconciler.published is not None and not reconciler.error),
        )
        # A registry that is away later changes nothing: students keep the teachers that they know.
        server.metrics.probes.add_check("/readyz", "registry", lambda: "" if self._was_published else "does not answer")
        warn_of_loopback(self._settings.url, self._address, "--host 0.0.0.0")
        with self._lock:
            if self._load is not None:
                self._load.set_ready(self._instance, lambda: TeacherCounts(*server.load()))
                if not self._healthy:
                    self._load.set_state("unhealthy")
            if self._healthy:
                self._reconciler.set_desired(self._instance)
        self._reconciler.wait_until_current(_REGISTER_TIMEOUT_S)

    def start_draining(self) -> None:
        """Show as draining, and wait `linger_s` for students to hear of it."""
        with self._lock:
            self._draining = True
            if self._load is not None:
                self._load.set_state("draining")
        self._ready_file.remove()
        if self._reconciler is None or self._instance is None or not self._healthy:
            return
        quarter_s = self._drain_timeout_s / 4  # the rest is for requests in flight
        self._instance = replace(self._instance, state="draining")
        self._reconciler.set_desired(self._instance)
        if self._reconciler.wait_until_current(min(_WITHDRAW_TIMEOUT_S, quarter_s)):
            time.sleep(min(self._linger_s, quarter_s))

    def __enter__(self) -> TeacherRegistration:
        """Return the registration."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Leave discovery."""
        if self._load is not None:
            self._load.close()
        if self._reconciler is not None:
            self._reconciler.close(_WITHDRAW_TIMEOUT_S)

    def _on_health_change(self, healthy: bool) -> None:
        """Enter or leave discovery as the model's health changes. Return at once."""
        with self._lock:
            self._healthy = healthy
            if self._draining or self._instance is None:
                return
            if not healthy:
                self._ready_file.remove()
            if self._load is not None:
                self._load.set_state("ready" if healthy else "unhealthy")
            if self._reconciler is not None:
                self._reconciler.set_desired(self._instance if healthy else None)
            elif healthy:
                self._write_ready_file(self._instance)

    def _metadata(self, server: TeacherServer) -> dict[str, str]:
        meta = {**server.model.instance_meta, "pid": str(os.getpid())}
        if self.version:
            meta["version"] = self.version
        # Equal on student and teacher if they share a kernel, and so perhaps memory.
        with contextlib.suppress(OSError):
            meta["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        if server.settings.uds is not None:
            meta["uds"] = str(Path(server.settings.uds).absolute())
        if server.settings.credentials.cert:
            meta[names.TLS_META] = "1"
        return meta

    def _on_published(self, instance: Instance | None) -> None:
        if instance is not None and instance.state == "ready":
            self._was_published = True
            _log.info("registered as %s/%s at %s", instance.service, instance.id, self._settings.url)
            with self._lock:
                self._write_ready_file(instance)

    def _write_ready_file(self, instance: Instance) -> None:
        """Write the ready file, with the lock held, unless the teacher has ceased to be ready meanwhile.

        A registry may take long to show an instance; the file that is removed in that time must stay away.
        """
        if not self._healthy or self._draining:
            return
        content = {"endpoint": instance.endpoint, "port": instance.port, "metrics_port": self._metrics_port}
        self._ready_file.write({**content, "pid": os.getpid()})
