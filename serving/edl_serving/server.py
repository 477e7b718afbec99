"""The server's life: start, warm up, serve, drain, stop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from edl.errors import SettingsError
from edl.memory import keep_freed_memory
from edl.protocol import names
from edl.protocol.transport import grpc
from edl_serving.backend import Backend
from edl_serving.batcher import Batcher
from edl_serving.infer import Inference
from edl_serving.lifecycle import Lifecycle, State
from edl_serving.listening import check_path, check_port, private_path, publish, withdraw
from edl_serving.metrics import Metrics
from edl_serving.model import Model
from edl_serving.servicer import Servicer
from edl_serving.settings import ServerSettings
from edl_serving.shm import Regions

__all__ = ["TeacherServer"]

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_FLUSH_S = 0.25  # for RPCs that nobody waits for, such as watches of health


class TeacherServer:
    """Serves one model over KServe v2 gRPC, on the running event loop.

    Args:
        settings: see there.
        backends: one or more instances of the model, alike in names, types and shapes; each gets a thread of its own.
            The server closes them in `stop`.

    Raises:
        SettingsError: the backends cannot be served together, or under these settings.
    """

    def __init__(self, settings: ServerSettings, backends: Backend | Sequence[Backend]) -> None:
        self._settings = settings
        self._backends = (backends,) if isinstance(backends, Backend) else tuple(backends)
        self._model = Model(settings, self._backends)
        self._metrics = Metrics(settings.model)
        self._lifecycle: Lifecycle | None = None
        self._batcher: Batcher | None = None
        self._inference: Inference | None = None
        self._grpc: grpc.aio.Server | None = None
        self._health = health_aio.HealthServicer()
        self._port = 0
        self._own_path: tuple[str, tuple[int, int]] | None = None
        self._metrics_port: int | None = None

    @property
    def settings(self) -> ServerSettings:
        """As given."""
        return self._settings

    @property
    def model(self) -> Model:
        """What is served."""
        return self._model

    @property
    def metrics(self) -> Metrics:
        """The counters; `metrics.registry` is theirs."""
        return self._metrics

    @property
    def port(self) -> int:
        """The TCP port that is listened on, 0 before `start`."""
        return self._port

    @property
    def metrics_port(self) -> int | None:
        """The port of `/metrics`, None where it is off."""
        return self._metrics_port

    @property
    def ready(self) -> bool:
        """Warmed up and not draining: what `ServerReady`, `ModelReady` and the health service say."""
        return self._lifecycle is not None and self._lifecycle.ready

    async def start(self) -> int:
        """Listen (not ready yet), warm the model up, become ready. Once only.

        Returns:
            The TCP port.

        Raises:
            SettingsError: an address cannot be listened on.
            Exception: whatever `Backend.warm_up` raised.
        """
        keep_freed_memory()
        self._lifecycle = Lifecycle()
        self._batcher = Batcher(self._settings, self._model, self._backends, self._metrics)
        try:
            await self._listen(self._lifecycle, self._batcher)
            await self._batcher.warm_up()
        except asyncio.CancelledError:
            await self.stop(close_within_s=0.0)
            raise
        except BaseException:
            await self.stop()
            raise
        self._lifecycle.state = State.READY
        await self._tell_health(_SERVING)
        return self._port

    async def _listen(self, lifecycle: Lifecycle, batcher: Batcher) -> None:
        settings = self._settings
        regions = Regions(settings.max_regions, settings.max_region_bytes) if settings.shared_memory else None
        inference = self._inference = Inference(
            self._model, settings.max_queue_rows, lifecycle, batcher, regions, self._metrics
        )
        servicer = Servicer(self._model, lifecycle, inference, regions)
        self._grpc = grpc.aio.server(options=_options(settings))
        self._grpc.add_generic_rpc_handlers((servicer.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        await self._tell_health(_NOT_SERVING)
        check_port(settings.host, settings.port)
        if settings.uds is not None:
            check_path(settings.uds)
        self._port = self._bind(self._grpc, f"{settings.host}:{settings.port}")
        if settings.uds is not None:
            self._bind(self._grpc, f"unix:{private_path(settings.uds)}")
            self._own_path = settings.uds, publish(settings.uds)
        await self._grpc.start()
        self._metrics.watch("edl_teacher_in_flight", "Requests not answered yet.", lambda: lifecycle.in_flight)
        self._metrics.watch("edl_teacher_queue_rows", "Rows that wait.", lambda: batcher.queued_rows)
        if settings.metrics_port is not None:
            self._metrics_port = self._metrics.listen(settings.metrics_host, settings.metrics_port)

    @staticmethod
    def _bind(server: grpc.aio.Server, address: str) -> int:
        try:
            port: int = server.add_insecure_port(address)
        except RuntimeError as exc:
            raise SettingsError(f"cannot listen on {address}: {exc}") from exc
        return port

    async def leave(self) -> None:
        """Stop being ready, while requests are still served: students may not have heard of it yet."""
        if self._lifecycle is not None and self._lifecycle.state in (State.STARTING, State.READY):
            self._lifecycle.state = State.LEAVING
            await self._tell_health(_NOT_SERVING)

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Stop being ready, refuse new requests with UNAVAILABLE, finish the ones that were accepted.

        Args:
            timeout_s: None for `settings.drain_timeout_s`.

        Returns:
            Whether all were finished in time.
        """
        if self._lifecycle is None:
            return True
        await self.leave()
        self._lifecycle.state = State.DRAINING
        return await self._lifecycle.wait_idle(self._settings.drain_timeout_s if timeout_s is None else timeout_s)

    async def stop(self, close_within_s: float = 5.0) -> None:
        """Stop at once (requests in flight are cancelled) and close the backends. May be called twice.

        Args:
            close_within_s: how long to wait for the backends; the thread of one that hangs is left behind.
        """
        server, self._grpc = self._grpc, None
        batcher, self._batcher = self._batcher, None
        if self._lifecycle is not None:
            self._lifecycle.state = State.STOPPED
        own, self._own_path = self._own_path, None
        if own is not None:
            withdraw(*own)
        if server is not None:
            await self._tell_health(_NOT_SERVING)
            if self._inference is not None:
                self._inference.end_streams()
            await server.stop(_FLUSH_S)
        if batcher is not None:
            await batcher.close(close_within_s)
        self._metrics.close()

    async def _tell_health(self, status: int) -> None:
        for service in ("", names.SERVICE, self._model.name):
            await self._health.set(service, status)


def _options(settings: ServerSettings) -> list[tuple[str, int | str]]:
    return [
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # two servers on one port would share its students at random
        # Students ping to notice a teacher that vanished without a word; gRPC's default takes that for an attack.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ]
