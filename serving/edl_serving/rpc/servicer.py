"""KServe v2's methods as gRPC handlers over bytes.

gRPC is given no (de)serializers: inference requests are cut apart by `edl.protocol.codec`, without copying tensors, and
a message that does not parse is answered with INVALID_ARGUMENT rather than with gRPC's own INTERNAL.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from edl import __version__
from edl.protocol import kserve, names
from edl.protocol.transport import grpc
from edl_serving.lifecycle import Lifecycle
from edl_serving.model import ServedModel
from edl_serving.monitoring.metrics import Metrics
from edl_serving.request_error import RequestError, invalid_argument, malformed_message, quote
from edl_serving.rpc.clients import ConnectionLimiter, client_of
from edl_serving.rpc.inference import InferenceHandler, ServicerContext
from edl_serving.shared_memory.regions import ClientRegions, RegionTable

__all__ = ["InferenceServicer"]

M = TypeVar("M", bound=Message)


class InferenceServicer:
    """Answers KServe v2's methods but inference, which `InferenceHandler` answers.

    Args:
        model: that is served.
        lifecycle: says whether the server is ready.
        inference: answers inference calls.
        regions: registered shared memory, None where it is turned off.
        clients: refuses clients beyond the limits.
        metrics: counts refused calls.
    """

    def __init__(
        self,
        model: ServedModel,
        lifecycle: Lifecycle,
        inference: InferenceHandler,
        regions: RegionTable | None,
        clients: ConnectionLimiter,
        metrics: Metrics,
    ) -> None:
        self._model = model
        self._lifecycle = lifecycle
        self._inference = inference
        self._regions = regions
        self._clients = clients
        self._metrics = metrics

    def handler(self) -> grpc.GenericRpcHandler:
        """Return gRPC's handler for all methods of the service."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "ServerLive": _unary(kserve.ServerLiveRequest, self._server_live),
            "ServerReady": _unary(kserve.ServerReadyRequest, self._server_ready),
            "ModelReady": _unary(kserve.ModelReadyRequest, self._model_ready),
            "ServerMetadata": _unary(kserve.ServerMetadataRequest, self._server_metadata),
            "ModelMetadata": _unary(kserve.ModelMetadataRequest, self._model_metadata),
            "ModelConfig": _unary(kserve.ModelConfigRequest, self._model_config),
            "RepositoryIndex": _unary(kserve.RepositoryIndexRequest, self._repository_index),
            "SystemSharedMemoryStatus": _unary(kserve.SystemSharedMemoryStatusRequest, self._shm_status),
            "SystemSharedMemoryRegister": _unary(kserve.SystemSharedMemoryRegisterRequest, self._shm_register),
            "SystemSharedMemoryUnregister": _unary(kserve.SystemSharedMemoryUnregisterRequest, self._shm_unregister),
            "ModelInfer": grpc.unary_unary_rpc_method_handler(self._inference.infer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._inference.stream_infer),
        }
        return grpc.method_handlers_generic_handler(names.SERVICE, handlers)

    def _server_live(self, request: kserve.ServerLiveRequest, context: ServicerContext) -> Message:
        return kserve.ServerLiveResponse(live=True)

    def _server_ready(self, request: kserve.ServerReadyRequest, context: ServicerContext) -> Message:
        return kserve.ServerReadyResponse(ready=self._lifecycle.ready)

    def _model_ready(self, request: kserve.ModelReadyRequest, context: ServicerContext) -> Message:
        known = request.name == self._model.name and request.version in ("", self._model.version)
        return kserve.ModelReadyResponse(ready=known and self._lifecycle.ready)

    def _server_metadata(self, request: kserve.ServerMetadataRequest, context: ServicerContext) -> Message:
        return kserve.ServerMetadataResponse(name="edl", version=__version__, extensions=self._model.extensions())

    def _model_metadata(self, request: kserve.ModelMetadataRequest, context: ServicerContext) -> Message:
        self._check_room(context)
        self._model.check_request(request.name, request.version)
        return self._model.metadata()

    def _model_config(self, request: kserve.ModelConfigRequest, context: ServicerContext) -> Message:
        self._model.check_request(request.name, request.version)
        return self._model.config()

    def _repository_index(self, request: kserve.RepositoryIndexRequest, context: ServicerContext) -> Message:
        ready = self._lifecycle.ready
        answer = kserve.RepositoryIndexResponse()
        if ready or not request.ready:
            answer.models.add(
                name=self._model.name,
                version=self._model.version,
                state="READY" if ready else "UNAVAILABLE",
                reason="" if ready else self._lifecycle.state.value,
            )
        return answer

    def _shm_status(self, request: kserve.SystemSharedMemoryStatusRequest, context: ServicerContext) -> Message:
        return self._local_regions(context).status(request.name)

    def _shm_register(self, request: kserve.SystemSharedMemoryRegisterRequest, context: ServicerContext) -> Message:
        self._local_regions(context).register(request)
        return kserve.SystemSharedMemoryRegisterResponse()

    def _shm_unregister(self, request: kserve.SystemSharedMemoryUnregisterRequest, context: ServicerContext) -> Message:
        self._local_regions(context).unregister(request.name)
        return kserve.SystemSharedMemoryUnregisterResponse()

    def _check_room(self, context: ServicerContext) -> None:
        """Refuse a student beyond the limits when it connects, rather than at its first request."""
        try:
            self._clients.close_call(self._clients.open_call(client_of(context)))
        except RequestError as error:
            self._metrics.record_rejected_call(error)
            raise

    def _local_regions(self, context: ServicerContext) -> ClientRegions:
        if self._regions is None:
            raise invalid_argument("shared memory is turned off on this server")
        regions = self._regions.regions_of_client(context.peer())
        if regions is None:
            raise invalid_argument(f"shared memory is for clients on this host, not for {quote(context.peer())}")
        return regions


def _unary(kind: type[M], answer: Callable[[M, ServicerContext], Message]) -> grpc.RpcMethodHandler[Any, Any]:
    async def handle(data: bytes, context: ServicerContext) -> bytes:
        try:
            try:
                request = kind.FromString(data)
            except DecodeError as exc:
                raise malformed_message(data, f"malformed {kind.__name__}: {exc}") from exc
            return answer(request, context).SerializeToString()
        except RequestError as error:
            await context.abort(error.code, error.message, error.trailing_metadata)

    handler: Callable[[bytes, ServicerContext], Awaitable[bytes]] = handle
    return grpc.unary_unary_rpc_method_handler(handler)
