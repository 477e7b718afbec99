"""`TeacherServer`, which starts, warms up, serves, drains and stops; `serve`, which runs a server until a signal."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from edl.background import start_call
from edl.errors import SettingsError
from edl.memory import keep_freed_memory
from edl.protocol import names
from edl.protocol.channel import is_this_host, listen, token_checks
from edl.protocol.tls import CredentialFiles
from edl.protocol.transport import grpc
from edl_serving.admission import (
    ConnectionLimiter,
    Lifecycle,
    ServerState,
    warn_of_no_credentials,
    watch_revocations,
)
from edl_serving.backends.backend import Backend
from edl_serving.batching.batcher import Batcher, Canary
from edl_serving.http_api import HttpApi
from edl_serving.inference import InferenceServicer
from edl_serving.model import ServedModel
from edl_serving.monitoring import AccessLog, Metrics
from edl_serving.settings import ServerSettings, authority
from edl_serving.shared_memory import PeerCredentials, RegionTable

_log = logging.getLogger(__name__)

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_AGE_GRACE_MS = 30_000  # time for requests in flight on a connection that reached its age; the same as for draining
_SWEEP_EVERY_S = 5.0  # longest time that a killed student's memory is kept; a sweep takes microseconds
_TURN_S = 4.0
"""How long an event loop iteration may take before the process counts as stuck. The operator's probes wait 5 s."""
_FAULT_LOOK_S = 1.0
"""Seconds between fault checks of the backends. A check takes microseconds, and students notice a dead teacher equally
fast."""
_MAX_CALLS = 1024  # open calls of one connection; gRPC makes the client hold back further ones
_FLUSH_S = 0.25  # time to end RPCs without a waiting client, such as health watches


class TeacherServer:
    """Serves a model over KServe v2 gRPC, on the running event loop.

    Args:
        settings: The server's settings.
        backends: Instances of the model; their inputs and outputs must have equal names, types and shapes. Each
            instance runs in its own thread; `stop` closes the instances.

    Attributes:
        metrics: The counters; `metrics.registry` is their Prometheus registry.
        port: The TCP port that the server listens on; 0 before `start`.
        metrics_port: The port of `/metrics`; None if metrics are turned off.

    Raises:
        SettingsError: The backends cannot be served together, or cannot be served with these settings.
    """

    def __init__(self, settings: ServerSettings, backends: Backend | Sequence[Backend]) -> None:
        self.settings = settings
        self._backends = (backends,) if isinstance(backends, Backend) else tuple(backends)
        self.model = ServedModel(settings, self._backends)
        self.metrics = Metrics(settings.model)
        self._lifecycle = Lifecycle()
        self._batcher: Batcher | None = None
        self._inference: InferenceServicer | None = None
        self._grpc: grpc.aio.Server | None = None
        self._files = CredentialFiles.of(settings.credentials, serving=True)
        self._health = health_aio.HealthServicer()
        self.port = 0
        self.metrics_port: int | None = None
        self._access: AccessLog | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._faults: dict[str, str] = {}
        self._ready_watch: Callable[[bool], None] | None = None

    @property
    def ready(self) -> bool:
        """Whether the server is warmed up, healthy and not draining; `ServerReady` and `ModelReady` report this."""
        return self._lifecycle.ready

    async def start(self) -> int:
        """Listen (not ready yet), warm up the model, and become ready. Call it once.

        Returns:
            The TCP port.

        Raises:
            SettingsError: The server cannot listen on an address.
            Exception: Any exception that `Backend.warm_up` raised.
        """
        keep_freed_memory()
        self._batcher = Batcher(self.settings, self.model, self._backends, self.metrics)
        try:
            await self._listen(self._batcher)
            await self._batcher.warm_up()
        except asyncio.CancelledError:
            await self.stop(close_within_s=0.0)
            raise
        except BaseException:
            await self.stop()
            raise
        self._lifecycle.state = ServerState.READY
        await self._tell_health(_SERVING)
        if self.settings.canary_s is not None:
            self._start_canary(self._batcher, self.settings.canary_s)
        if any(type(backend).find_fault is not Backend.find_fault for backend in self._backends):
            self._run_task(self._watch_faults())
        return self.port

    def _run_task(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    def load(self) -> tuple[int, float, int, int]:
        """Return four numbers: rows computed, seconds that workers spent on them, workers, and rows waiting.

        Callable from any thread.
        """
        rows, compute_s = self.metrics.computed()
        batcher = self._batcher
        return rows, compute_s, len(self._backends), batcher.queue.rows if batcher is not None else 0

    def watch_ready(self, changed: Callable[[bool], None]) -> None:
        """Call `changed` on the event loop when the canary or a backend reports a fault, and when the fault ends.

        Args:
            changed: Function to call, with True if the server is ready again and False if it is not.
        """
        self._ready_watch = changed

    def _add_checks(self) -> None:
        loop, checks = asyncio.get_running_loop(), self.metrics.checks

        def check_loop() -> str:
            turned = threading.Event()
            try:
                loop.call_soon_threadsafe(turned.set)
            except RuntimeError:  # the loop is closed, so the process is about to end
                return ""
            return "" if turned.wait(_TURN_S) else f"the event loop has been stuck for {_TURN_S:g} s"

        def check_model() -> str:
            if self._lifecycle.state is ServerState.STARTING:
                return "the model is warming up"
            if self._lifecycle.state is not ServerState.READY:
                return "draining"
            return next(iter(self._faults.values()), "")

        checks.add("/livez", "event-loop", check_loop)
        checks.add("/livez", "model", lambda: self.metrics.find_stall(self.settings.stall_timeout_s))
        checks.add("/readyz", "model", check_model)

    def _start_canary(self, batcher: Batcher, every_s: float) -> None:
        async def changed(healthy: bool) -> None:
            await self._set_fault("canary", "" if healthy else "the model fails on a row of the sample (--canary)")

        row = self._backends[0].sample(1)
        canary = Canary(batcher, self.model, row, every_s, self.settings.canary_timeout_s, changed)
        self.metrics.add_gauge(
            "edl_teacher_healthy", "Whether the last row of the canary was answered.", lambda: float(canary.healthy)
        )
        self._run_task(canary.run())

    async def _watch_faults(self) -> None:
        while True:
            await self._set_fault("backend", next(filter(None, (b.find_fault() for b in self._backends)), ""))
            await asyncio.sleep(_FAULT_LOOK_S)

    async def _set_fault(self, finder: str, fault: str) -> None:
        """Set or clear the fault that `finder` reports; the server is ready only while no fault is set."""
        lifecycle = self._lifecycle
        if lifecycle.state is not ServerState.READY:
            return
        self._faults.pop(finder, None)
        if fault:
            self._faults[finder] = fault
        healthy = not self._faults
        if healthy == lifecycle.healthy:
            return
        lifecycle.healthy = healthy
        await self._tell_health(_SERVING if healthy else _NOT_SERVING)
        if self._ready_watch is not None:
            self._ready_watch(healthy)

    async def _listen(self, batcher: Batcher) -> None:
        settings, lifecycle, files = self.settings, self._lifecycle, self._files
        regions: RegionTable | None = None
        if settings.shared_memory:
            peers = PeerCredentials(lambda: self.port)
            regions = RegionTable(peers, settings.shared_memory_users)
            self._run_task(_sweep(regions))
        if settings.access_log is not None:
            self._access = AccessLog(settings.access_log, self.model.name, self.model.version)
        clients = ConnectionLimiter(settings)
        inference = self._inference = InferenceServicer(
            settings, self.model, lifecycle, batcher, regions, clients, self.metrics, self._access, files
        )
        # A kubelet's probes send no metadata.
        checks = token_checks(files, open_service="grpc.health.v1.Health" if settings.open_health else "")
        self._grpc = grpc.aio.server(options=_options(settings), interceptors=checks)
        self._grpc.add_generic_rpc_handlers(inference.handlers())
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        await self._tell_health(_NOT_SERVING)
        check_port(settings.host, settings.port)
        address = authority(settings.host, settings.port)
        try:
            self.port = listen(self._grpc, address, files)
        except RuntimeError as exc:
            raise SettingsError(f"cannot listen on {address}: {exc}") from exc
        if settings.tensor_channel:
            inference.channels.listen(settings.host, settings.channel_port)
        await self._grpc.start()
        if files is not None:
            self._run_task(watch_revocations(files, inference.end_streams))
            if files.tls:
                self._watch_certificate(files)
        for name, text, read in (
            ("edl_teacher_in_flight", "Requests not answered yet.", lambda: lifecycle.in_flight),
            ("edl_teacher_queue_rows", "Rows in the queue.", lambda: batcher.queue.rows),
            ("edl_teacher_queue_bytes", "Bytes of requests in the queue.", lambda: batcher.queue.nbytes),
            ("edl_teacher_connections", "Clients with open calls.", lambda: len(clients)),
            ("edl_teacher_streams", "Streams that are open.", lambda: clients.streams),
            ("edl_teacher_client_bytes", "Bytes of requests and answers in flight.", lambda: clients.nbytes),
        ):
            self.metrics.add_gauge(name, text, read)
        if regions is not None:
            self.metrics.add_gauge("edl_teacher_regions", "Regions of shared memory.", lambda: len(regions))
            self.metrics.add_gauge("edl_teacher_region_bytes", "Bytes in these regions.", lambda: regions.nbytes)
        self._add_checks()
        if settings.metrics_port is not None:
            refusal = ""
            if files is not None:
                refusal = "this server has TLS or tokens, but this port has neither: use gRPC"
            elif settings.metrics_host != settings.host and not is_this_host(authority(settings.metrics_host, 0)):
                refusal = "this port is open to more hosts than the server: set --metrics-host like --host, or use gRPC"
            api = HttpApi(inference, asyncio.get_running_loop(), settings.max_message_bytes, refusal)
            self.metrics_port = self.metrics.listen(settings.metrics_host, settings.metrics_port, api)

    def _watch_certificate(self, files: CredentialFiles) -> None:
        def expiry() -> float:
            return float(ssl.cert_time_to_seconds(files.current().not_after))

        text = "When the certificate in use expires, in seconds since 1970."
        self.metrics.add_gauge("edl_teacher_certificate_expiry_seconds", text, expiry)
        material = files.current()
        names = ", ".join(material.names) or "no host"
        _log.info("TLS with a certificate for %s, valid until %s", names, material.not_after)

    async def leave(self) -> None:
        """Stop being ready, but keep serving requests, because students may not have noticed yet."""
        if self._lifecycle.state in (ServerState.STARTING, ServerState.READY):
            self._lifecycle.state = ServerState.LEAVING
            await self._tell_health(_NOT_SERVING)

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Stop being ready, refuse new requests with UNAVAILABLE, and finish accepted requests.

        Args:
            timeout_s: Seconds to wait for the accepted requests; None for `settings.drain_timeout_s`.

        Returns:
            Whether all accepted requests were finished in time.
        """
        if self._batcher is None:  # not started, or stopped
            return True
        await self.leave()
        self._lifecycle.state = ServerState.DRAINING
        return await self._lifecycle.wait_idle(self.settings.drain_timeout_s if timeout_s is None else timeout_s)

    async def stop(self, close_within_s: float = 5.0) -> None:
        """Stop at once, cancel requests in flight, and close the backends. May be called twice.

        Args:
            close_within_s: Seconds to wait for the backends to close; the thread of a hanging backend is abandoned.
        """
        server, batcher, access = self._grpc, self._batcher, self._access
        self._grpc = self._batcher = self._access = None
        self._lifecycle.state = ServerState.STOPPED
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        if server is not None:
            await self._tell_health(_NOT_SERVING)
            if self._inference is not None:
                self._inference.end_streams()
                await asyncio.gather(server.stop(_FLUSH_S), self._inference.channels.close())
        if batcher is not None:
            await batcher.close(close_within_s)
        self.metrics.close()
        if access is not None:
            await asyncio.to_thread(access.close)

    async def _tell_health(self, status: int) -> None:
        for service in ("", names.SERVICE, self.model.name):
            await self._health.set(service, status)


async def _sweep(regions: RegionTable) -> None:
    while True:
        await asyncio.sleep(_SWEEP_EVERY_S)
        regions.remove_abandoned()


def _options(settings: ServerSettings) -> list[tuple[str, int | str]]:
    mutual = settings.credentials.cert and settings.credentials.ca
    age_ms = min(round(settings.max_connection_age_s * 1000), 2**31 - 1)
    aging = [("grpc.max_connection_age_ms", age_ms), ("grpc.max_connection_age_grace_ms", _AGE_GRACE_MS)]
    return [
        *(aging if mutual else []),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.per_message_decompression", 0),  # see `request_error.malformed_message`
        ("grpc.max_concurrent_streams", _MAX_CALLS),
        ("grpc.so_reuseport", 0),  # otherwise two servers on one port would share its students at random
        # Students ping to detect a teacher that vanished; by default, gRPC treats such pings as an attack.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ]


_HOSTS = "give --host 127.0.0.1 for students on this machine, 0.0.0.0 for other machines too, or its own address"
_REMEDIES = {
    errno.EADDRINUSE: "use another --port, or 0 for a free one",
    errno.EADDRNOTAVAIL: f"this machine has no such address; {_HOSTS}",
    errno.EACCES: "a --port above 1023 needs no privileges",
}


def check_port(host: str, port: int) -> None:
    try:
        family, _, _, _, place = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        socket.create_server(place[:2], family=family).close()
    except socket.gaierror as exc:
        raise SettingsError(f"cannot listen on {host}:{port}: no address of that name is known; {_HOSTS}") from exc
    except OSError as exc:
        if exc.errno in _REMEDIES:  # with other errors, gRPC may still succeed
            remedy = _REMEDIES[exc.errno]
            raise SettingsError(f"cannot listen on {host}:{port}: {os.strerror(exc.errno)}; {remedy}") from exc


_CLOSE_S = 5.0  # time for backends to release GPU memory after a drain
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(
    settings: ServerSettings,
    backends: Backend | Sequence[Backend],
    *,
    join: Callable[[TeacherServer], None] | None = None,
    leave: Callable[[], None] | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Call it from the main thread.

    At the first signal, the server stops being ready, and `leave` is called while requests are still served. Then new
    requests are refused and accepted ones are finished. All of this takes at most `settings.drain_timeout_s`. A second
    signal ends the process at once.

    Args:
        settings: The server's settings.
        backends: Instances of the model; see `TeacherServer`.
        join: Function that enters discovery. It is called in a thread once the server is ready. If it raises, the
            server stops and the error is raised here.
        leave: Function that leaves discovery. It is called in a thread when draining begins. If it raises, the error is
            logged.

    Returns:
        Exit code for the process: 0 if every accepted request was answered, 1 if the deadline passed first.

    Raises:
        SettingsError: The settings are invalid, or the backends cannot be served.
        Exception: Any exception that `Backend.warm_up` or `join` raised.
    """
    return asyncio.run(_serve(TeacherServer(settings, backends), join, leave))


async def _serve(
    server: TeacherServer, join: Callable[[TeacherServer], None] | None, leave: Callable[[], None] | None
) -> int:
    settings = server.settings
    signalled = _on_first_signal()
    close_within_s = 0.0
    joined = asyncio.Event()
    if join is not None:
        checks = server.metrics.checks
        checks.add("/readyz", "discovery", lambda: "" if joined.is_set() else "not registered yet")
    try:
        starting = asyncio.ensure_future(server.start())
        if not await _done_before(signalled, starting):
            starting.cancel()
            await asyncio.wait({starting})
            return 0
        _log.info("model %r is served on %s:%d", settings.model, settings.host, server.port)
        warn_of_no_credentials(settings.host, settings.credentials)
        if join is not None:
            joining = _in_thread(lambda: join(server))
            if not await _done_before(signalled, joining):  # else `leave` could overtake it
                await asyncio.wait({joining}, timeout=settings.drain_timeout_s / 2)
                joining.cancel()  # so that a call that ends later does not try to wake a closed loop
            joined.set()
        await signalled.wait()
        drained = await _drain(server, leave)
        if drained:
            close_within_s = _CLOSE_S
        return 0 if drained else 1
    finally:
        await server.stop(close_within_s)
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)


def _on_first_signal() -> asyncio.Event:
    """Return an event that is set by the first signal; a second signal has its default effect."""
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()

    def handle(number: signal.Signals) -> None:
        for ended_by in _SIGNALS:
            loop.remove_signal_handler(ended_by)
            signal.signal(ended_by, signal.SIG_DFL)
        _log.info("%s: draining; a second signal ends the process at once", number.name)
        signalled.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, handle, number)
    return signalled


async def _done_before(signalled: asyncio.Event, work: asyncio.Future[Any]) -> bool:
    """Wait for `work`; return False if the signal comes first. Exceptions from `work` are raised here."""
    signal_wait = asyncio.ensure_future(signalled.wait())
    try:
        await asyncio.wait({signal_wait, work}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        signal_wait.cancel()
    if work.done():
        work.result()
    return work.done()


def _in_thread(call: Callable[[], None]) -> asyncio.Future[None]:
    """Run `call` in a thread that does not keep the process alive if it hangs."""
    return asyncio.wrap_future(start_call("edl-discovery", call))


async def _drain(server: TeacherServer, leave: Callable[[], None] | None) -> bool:
    """Drain the server; return whether all accepted requests were answered within the deadline in the settings."""
    loop = asyncio.get_running_loop()
    timeout_s = server.settings.drain_timeout_s
    deadline = loop.time() + timeout_s
    await server.leave()
    if leave is not None:
        try:
            await asyncio.wait_for(_in_thread(leave), timeout_s / 2)
        except asyncio.TimeoutError:
            _log.error("leaving discovery takes longer than %.1f s; continuing without it", timeout_s / 2)
        except Exception as exc:  # noqa: BLE001 - whatever discovery says, students' requests are finished first
            _log.error("leaving discovery raised %s: %s", type(exc).__name__, exc, exc_info=exc)
    drained = await server.drain(max(0.0, deadline - loop.time()))
    if drained:
        _log.info("drained")
    else:
        _log.error("requests were left unanswered after %.1f s", timeout_s)
    return drained
