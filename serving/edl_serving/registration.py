"""A server's entry in discovery, which is created once the server is ready, updated while it drains, and then removed.

If the registry does not answer, the server keeps serving, and an `InstanceReconciler` retries in its own thread.
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edl.background import BackgroundLoop, start_call
from edl.backoff import Backoff
from edl.discovery import Instance, Registry, open_registry
from edl.discovery.records import check_ttl, validated
from edl.discovery.registry import Registration
from edl.errors import DiscoveryError, SettingsError
from edl.load_reporting import LoadPublisher, LoadSource
from edl.protocol import names
from edl.protocol.channel import is_this_host
from edl.settings import LoadSettings
from edl_serving.settings import authority

if TYPE_CHECKING:
    from edl_serving.server import TeacherServer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RegistrationSettings:
    """A server's entry in discovery.

    Attributes:
        service: Name that students look up.
        url: URL of the registry; None to stay out of discovery.
        ttl_s: Seconds without a renewal after which the entry expires.
        id: Id of the entry, unique within the service; None for an id made of the host's name and the port, which stays
            the same after a restart.
        meta: Keys and values that students can read; they override the server's own.
    """

    service: str
    url: str | None
    ttl_s: float = 10.0
    id: str | None = None
    capacity: float = 1.0
    tags: tuple[str, ...] = ()
    meta: Mapping[str, str] = field(default_factory=dict)
    load: LoadSettings = field(default_factory=LoadSettings)

    def check(self, address: str) -> None:
        """Raise if no registry would accept the entry. Call this before a large model is loaded."""
        if self.url is not None:
            check_ttl(self.ttl_s)
            validated(self.instance(address, 0 if address.startswith("unix:") else 1, model="", meta={}))

    def instance(self, address: str, port: int, model: str, meta: Mapping[str, str]) -> Instance:
        return Instance(
            service=self.service,
            id=self.id or re.sub(r"[^A-Za-z0-9.-]+", "-", f"{socket.gethostname()}-{port}").strip("-"),
            address=address,
            port=port,
            capacity=self.capacity,
            model=model,
            tags=self.tags,
            meta={**meta, **self.meta},
        )


def warn_of_loopback(discovery_url: str | None, address: str, remedy: str) -> None:
    """Warn if a loopback address is registered where other hosts look it up."""
    if (
        discovery_url is not None
        and discovery_url.startswith(("consul", "etcd", "edl"))
        and is_this_host(authority(address, 0))
    ):
        _log.warning("only students on this host can reach %s; for students on other hosts, set %s", address, remedy)


class ReadyFile:
    """A JSON file, written atomically, that exists while a process is ready; SettingsError if it cannot be written."""

    def __init__(self, path: str | None) -> None:
        self._path = Path(path or os.devnull).expanduser().absolute()
        self._draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        self._wanted = path is not None
        if self._wanted and not self._path.parent.is_dir():
            raise SettingsError(f"--ready-file: no such folder: {str(self._path.parent)!r}")
        self.remove()
        if self._wanted:
            with self._errors_named():
                self._draft.touch()
                self._draft.unlink()

    def write(self, content: Mapping[str, Any]) -> None:
        if self._wanted:
            with self._errors_named():
                self._draft.write_text(json.dumps(content) + "\n")
                self._draft.replace(self._path)

    def remove(self) -> None:
        if self._wanted:
            with self._errors_named():
                self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise SettingsError(f"--ready-file {str(self._path)!r}: {exc.strerror or exc}") from exc

    def __enter__(self) -> ReadyFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


_FIRST_RETRY_S = 0.25  # a registry that restarts is back within a second or two
_LAST_RETRY_S = 5.0  # half of the default TTL; a thousand teachers then make 200 requests a second
_IDLE_S = 3600.0  # pause while nothing changes; a change wakes the thread


class InstanceReconciler:
    """Registers, updates or deregisters an instance in a thread, and retries while the registry does not answer.

    `published` is the instance that was last published in the registry, or None. `on_published` is called with this
    value in the thread.
    """

    def __init__(self, url: str, ttl_s: float, on_published: Callable[[Instance | None], None] | None = None) -> None:
        self._url = url
        self._ttl_s = ttl_s
        self._on_published = on_published
        self._changed = threading.Condition()  # notified of changes to `published` and the failure
        self._backoff = Backoff(_FIRST_RETRY_S, _LAST_RETRY_S)
        self._desired: Instance | None = None
        self.published: Instance | None = None
        self._failure: Exception | None = None
        self._trouble = ""
        self._registration: Registration | None = None
        self._registry: Registry | None = None
        try:
            self._registry = open_registry(url)
        except DiscoveryError as exc:
            _log.warning("discovery at %s has not answered yet: %s", url, exc)
        self._loop = BackgroundLoop("edl-reconciler", self._reconcile)

    @property
    def error(self) -> str:
        """Why the registry lacks the desired instance, or why its lease cannot be renewed; empty if neither applies."""
        registration = self._registration
        if registration is not None and registration.error:
            return registration.error
        return "" if self.published == self._desired else self._trouble or "not published yet"

    def set_desired(self, instance: Instance | None) -> None:
        """Set the instance that the registry should show, or None. Returns at once."""
        self._desired = instance
        self._backoff = Backoff(_FIRST_RETRY_S, _LAST_RETRY_S)
        self._loop.wake()

    def wait_until_current(self, timeout_s: float) -> bool:
        """Wait until the registry shows the desired instance; False on timeout. Raise the thread's error, if any."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self.published == self._desired, timeout_s)
            if self._failure is not None:
                raise self._failure
            return self.published == self._desired

    def close(self, timeout_s: float = 5.0) -> None:
        """Deregister the instance; if the registry does not answer within `timeout_s`, let the lease expire."""
        deadline = time.monotonic() + timeout_s
        self.set_desired(None)
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self.published is None, timeout_s)
        try:
            start_call("edl-reconciler", self._let_go).result(max(deadline - time.monotonic(), 0.0))
        except FutureTimeoutError:
            _log.warning("discovery does not answer; others see this teacher as gone within %g s", self._ttl_s)

    def _let_go(self) -> None:
        self._loop.close()
        if self._registration is not None:
            self._registration.close()
        if self._registry is not None:
            self._registry.close()

    def _reconcile(self) -> float | None:
        """Publish the desired instance if the registry does not show it; return the seconds until the next check."""
        desired = self._desired
        if desired == self.published:
            return _IDLE_S
        try:
            self._publish(desired)
            self._trouble = ""
            if self._on_published is not None:
                self._on_published(desired)
        except DiscoveryError as exc:
            self._trouble = str(exc)
            level = logging.DEBUG if self._backoff.failures else logging.WARNING
            _log.log(level, "discovery does not answer; retrying until it does: %s", exc)
            return self._backoff.next_wait_s()
        except Exception as exc:  # noqa: BLE001 - raised again in `wait_until_current`
            _log.error("discovery: %s", exc, exc_info=_log.isEnabledFor(logging.DEBUG))
            with self._changed:
                self._failure = exc
                self._changed.notify_all()
            return None
        with self._changed:
            self.published = desired
            self._changed.notify_all()
        return 0.0

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
    """Warn if another process has the same id: if both are alive, they keep replacing each other's entry."""
    for instance in registry.snapshot(desired.service).instances:
        if instance.id == desired.id and instance.endpoint != desired.endpoint:
            _log.warning(
                "%s/%s is registered at %s, and is replaced: if that teacher is alive, give each teacher its own --id",
                *(desired.service, desired.id, instance.endpoint),
            )


@dataclass(frozen=True)
class TeacherCounts:
    """A teacher's counters. `note` says why `rows` is unknown (None); `compute_s` is summed over workers."""

    rows: int | None = 0
    compute_s: float | None = 0.0
    workers: int = 1
    queue_rows: int | None = 0
    note: str = ""


class TeacherLoad:
    """Publishes a teacher's load from before its model loads until the teacher leaves; does nothing without a URL."""

    def __init__(self, url: str | None, service: str, settings: LoadSettings) -> None:
        self._state = "starting"
        self._instance: Instance | None = None
        self._count: Callable[[], TeacherCounts] = TeacherCounts
        self._counts = TeacherCounts()
        source = LoadSource(service, "teachers", self._read, self._describe)
        self._publisher = LoadPublisher(url, [source], settings) if url is not None and settings.publish else None

    def set_ready(self, instance: Instance, count: Callable[[], TeacherCounts]) -> None:
        """Publish the teacher's counters from now on; `count` is called in the publisher's thread."""
        self._count = count
        self._instance = instance
        self.set_state("ready")

    def set_state(self, state: str) -> None:
        """Publish "starting", "ready", "unhealthy" or "draining" at once."""
        if state != self._state:
            self._state = state
            if self._publisher is not None:
                self._publisher.publish_soon()

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _read(self) -> Mapping[str, float | None]:
        self._counts = self._count()
        return {"rows": self._counts.rows, "compute_s": self._counts.compute_s}

    def _describe(self) -> Mapping[str, Any]:
        instance, counts = self._instance, self._counts
        fields = {"state": self._state, "workers": counts.workers, "queue_rows": counts.queue_rows, "note": counts.note}
        if instance is None:
            return fields
        # The path of a Unix socket means nothing to other hosts.
        endpoint = "" if instance.address.startswith("unix:") else instance.endpoint
        found = {"teacher": instance.id, "model": instance.model, "version": instance.meta.get("version", "")}
        return {**fields, **found, "endpoint": endpoint}


class ProbeStatus(enum.Enum):
    """The outcome of a readiness probe."""

    READY = "ready"
    NOT_READY = "not ready"
    NO_ANSWER = "no answer"


class ReadinessTracker:
    """Decides how long a server stays registered: until it reports not ready, or misses `failures` probes in a row."""

    def __init__(self, failures: int) -> None:
        self._failures = failures
        self._missed = 0
        self.registered = False

    def record_probe(self, status: ProbeStatus) -> bool:
        self._missed = self._missed + 1 if status is ProbeStatus.NO_ANSWER else 0
        patient = self.registered and status is ProbeStatus.NO_ANSWER and self._missed < self._failures
        self.registered = status is ProbeStatus.READY or patient
        return self.registered


_WITHDRAW_TIMEOUT_S = 2.0
"""How long a drain waits for a registry that may be unreachable. After that, the lease is left to expire."""
_REGISTER_TIMEOUT_S = 10.0
"""How long to wait for a registry to accept or refuse an instance; enough for a registry on another continent."""


class TeacherRegistration:
    """Keeps a teacher in discovery (and its ready file) from `register` to `start_draining`, while it is healthy."""

    def __init__(self, settings: RegistrationSettings, address: str, linger_s: float, ready_file: ReadyFile) -> None:
        self._settings = settings
        self._address = address
        self._linger_s = linger_s
        self._ready_file = ready_file
        self._instance: Instance | None = None
        self._metrics_port: int | None = None
        self._drain_timeout_s = 0.0
        self._load = TeacherLoad(settings.url, settings.service, settings.load)
        self._reconciler: InstanceReconciler | None = None
        self._lock = threading.Lock()  # between the event loop, which reports health, and the threads of the callers
        self._healthy = True
        self._draining = False
        self._was_published = False
        if settings.url is not None:
            self._reconciler = InstanceReconciler(settings.url, settings.ttl_s, self._on_published)

    def register(self, server: TeacherServer) -> None:
        """Enter discovery. If the registry does not answer, the reconciler retries in the background."""
        self._metrics_port = server.metrics_port
        self._drain_timeout_s = server.settings.drain_timeout_s
        model = server.settings.model
        self._instance = self._settings.instance(self._address, server.port, model, self._metadata(server))
        server.watch_ready(self._on_health_change)
        # Replaces the check that `serve` adds until this returns, because the ready file may be written earlier. Once
        # registered, an outage of the registry does not matter: students keep the teachers that they know.
        unregistered = "" if self._reconciler is None else "not registered yet"
        server.metrics.checks.add("/readyz", "discovery", lambda: "" if self._was_published else unregistered)
        if self._reconciler is None:
            with self._lock:
                self._write_ready_file(self._instance)
            return
        reconciler = self._reconciler
        server.metrics.add_gauge(
            "edl_teacher_registered",
            "Whether the teacher is in discovery, and its lease is renewed.",
            lambda: float(reconciler.published is not None and not reconciler.error),
        )
        warn_of_loopback(self._settings.url, self._address, "--host 0.0.0.0")
        with self._lock:
            self._load.set_ready(self._instance, lambda: TeacherCounts(*server.load()))
            if self._healthy:
                self._reconciler.set_desired(self._instance)
            else:
                self._load.set_state("unhealthy")
        self._reconciler.wait_until_current(_REGISTER_TIMEOUT_S)

    def start_draining(self) -> None:
        """Show the teacher as draining, and wait `linger_s` for students to notice."""
        with self._lock:
            self._draining = True
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
        return self

    def __exit__(self, *exc: object) -> None:
        self._load.close()
        if self._reconciler is not None:
            self._reconciler.close(_WITHDRAW_TIMEOUT_S)

    def _on_health_change(self, healthy: bool) -> None:
        """Enter or leave discovery as the model's health changes. Returns at once."""
        with self._lock:
            self._healthy = healthy
            if self._draining or self._instance is None:
                return
            if not healthy:
                self._ready_file.remove()
            self._load.set_state("ready" if healthy else "unhealthy")
            if self._reconciler is not None:
                self._reconciler.set_desired(self._instance if healthy else None)
            elif healthy:
                self._write_ready_file(self._instance)

    def _metadata(self, server: TeacherServer) -> dict[str, str]:
        meta = {**server.model.instance_meta, "pid": str(os.getpid())}
        if server.model.version:
            meta["version"] = server.model.version
        # Equal on student and teacher if they run on one kernel, where they may share memory.
        with contextlib.suppress(OSError):
            meta["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
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
        """Write the ready file unless the teacher stopped being ready meanwhile. The caller holds the lock."""
        if not self._healthy or self._draining:
            return
        content = {"endpoint": instance.endpoint, "port": instance.port, "metrics_port": self._metrics_port}
        self._ready_file.write({**content, "pid": os.getpid()})
