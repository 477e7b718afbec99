"""KServe v2's methods as gRPC handlers over bytes.

gRPC is given no (de)serializers: inference requests are cut apart by `edl.protocol.codec`, without copying tensors, and
a message that does not parse is answered with INVALID_ARGUMENT rather than with gRPC's own INTERNAL.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError, Message

from edl import __version__
from edl.protocol import kserve, names
from edl.protocol.transport import grpc
from edl.quoting import quote
from edl_serving.admission import ServicerContext, client_of
from edl_serving.inference import InferenceHandler
from edl_serving.request_error import RequestError, invalid_argument, malformed_message
from edl_serving.shared_memory import ClientRegions

Answer: TypeAlias = Callable[[Any, ServicerContext], Message]

_ONE_MODEL = "this server has one model: start another with edl serve, and end one with SIGTERM"
_SYSTEM_MEMORY = "this server takes system shared memory only: SystemSharedMemoryRegister"
_ELSEWHERE = {
    "RepositoryModelLoad": _ONE_MODEL,
    "RepositoryModelUnload": _ONE_MODEL,
    "CudaSharedMemoryStatus": _SYSTEM_MEMORY,
    "CudaSharedMemoryRegister": _SYSTEM_MEMORY,
    "CudaSharedMemoryUnregister": _SYSTEM_MEMORY,
    "TraceSetting": "this server makes no traces: send traceparent, and read it in edl serve --access-log",
    "LogSettings": "the server's logging is set when it starts: edl serve --verbose and --log-format",
}
"""Methods of Triton that this server does not have, and what to use instead."""


class InferenceServicer:
    """Answers KServe v2's methods but inference, which `InferenceHandler` answers."""

    def __init__(self, inference: InferenceHandler) -> None:
        self._inference = inference
        self._model = inference.model
        self._lifecycle = inference.lifecycle

    def handler(self) -> grpc.GenericRpcHandler:
        """Return gRPC's handler for all methods of the service."""
        answers: dict[str, Answer] = {
            "ServerLive": lambda request, context: kserve.ServerLiveResponse(live=True),
            "ServerReady": lambda request, context: kserve.ServerReadyResponse(ready=self._lifecycle.ready),
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            "SystemSharedMemoryStatus": lambda request, context: self._local_regions(context).status(request.name),
            "SystemSharedMemoryRegister": self._shm_register,
            "SystemSharedMemoryUnregister": self._shm_unregister,
        }
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "ModelInfer": grpc.unary_unary_rpc_method_handler(self._inference.infer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._inference.stream_infer),
        }
        handlers |= {name: _unary(getattr(kserve, f"{name}Request"), answer) for name, answer in answers.items()}
        handlers |= {name: _refusing(f"no method {name}: {instead}") for name, instead in _ELSEWHERE.items()}
        return grpc.method_handlers_generic_handler(names.SERVICE, handlers)

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

    def _model_statistics(self, request: kserve.ModelStatisticsRequest, context: ServicerContext) -> Message:
        """Describe the calls of the model by their rows; a request without a name means all models, as with Triton."""
        self._model.check_request(request.name or self._model.name, request.version)
        batches = self._inference.metrics.batches()
        answer = kserve.ModelStatisticsResponse()
        found = answer.model_stats.add(
            name=self._model.name,
            version=self._model.version,
            inference_count=sum(rows * count for rows, (count, _) in batches.items()),
            execution_count=sum(count for count, _ in batches.values()),
        )
        for rows, (count, compute_s) in sorted(batches.items()):
            spent = kserve.StatisticDuration(count=count, ns=round(compute_s * 1e9))
            found.batch_stats.add(batch_size=rows, compute_infer=spent)
        return answer

    def _repository_index(self, request: kserve.RepositoryIndexRequest, context: ServicerContext) -> Message:
        ready = self._lifecycle.ready
        answer = kserve.RepositoryIndexResponse()
        if ready or not request.ready:
            state, reason = ("READY", "") if ready else ("UNAVAILABLE", self._lifecycle.state.value)
            answer.models.add(name=self._model.name, version=self._model.version, state=state, reason=reason)
        return answer

    def _shm_register(self, request: kserve.SystemSharedMemoryRegisterRequest, context: ServicerContext) -> Message:
        self._local_regions(context).register(request)
        return kserve.SystemSharedMemoryRegisterResponse()

    def _shm_unregister(self, request: kserve.SystemSharedMemoryUnregisterRequest, context: ServicerContext) -> Message:
        self._local_regions(context).unregister(request.name)
        return kserve.SystemSharedMemoryUnregisterResponse()

    def _check_room(self, context: ServicerContext) -> None:
        """Refuse a student beyond the limits when it connects, rather than at its first request."""
        clients = self._inference.clients
        try:
            clients.close_call(clients.open_call(client_of(context)))
        except RequestError as error:
            self._inference.metrics.record_rejected_call(error)
            raise

    def _local_regions(self, context: ServicerContext) -> ClientRegions:
        table = self._inference.regions
        if table is None:
            raise invalid_argument("shared memory is turned off on this server")
        regions = table.regions_of_client(context.peer())
        if regions is None:
            raise invalid_argument(f"shared memory is for clients on this host, not for {quote(context.peer())}")
        return regions


def _unary(kind: type[Message], answer: Answer) -> grpc.RpcMethodHandler[Any, Any]:
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


def _refusing(words: str) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(data: bytes, context: ServicerContext) -> bytes:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, words)

    return grpc.unary_unary_rpc_method_handler(refuse)
