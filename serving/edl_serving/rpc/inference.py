"""`ModelInfer` and `ModelStreamInfer`: from a message's bytes to the response's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import NamedTuple

from edl.errors import ProtocolError
from edl.protocol import codec, names
from edl_serving.batching.batcher import Batcher
from edl_serving.batching.job import InferenceJob
from edl_serving.lifecycle import Lifecycle
from edl_serving.messages.request import DecodedRequest, RequestDecoder
from edl_serving.messages.trace_context import request_id_of, valid_traceparent
from edl_serving.model import ServedModel
from edl_serving.monitoring.metrics import Metrics
from edl_serving.request_error import RequestError, clip, malformed_message, quote
from edl_serving.rpc.access_log import AccessLog
from edl_serving.rpc.clients import ClientConnection, ConnectionLimiter, ServicerContext, StreamSlot, client_of
from edl_serving.rpc.stream import InferStreamHandler, encode_error
from edl_serving.shared_memory.regions import ClientRegions, RegionTable

__all__ = ["ServicerContext", "InferenceHandler"]

_log = logging.getLogger(__name__)


class CallOrigin(NamedTuple):
    """The client of a call, and the span that the call is part of (empty if the client sent none)."""

    client: str
    traceparent: str


class InferenceHandler:
    """Answers inference calls.

    Args:
        model: that is served.
        max_rows: of a request.
        lifecycle: says whether requests are taken.
        batcher: computes requests.
        regions: registered shared memory, None where it is turned off.
        clients: counts calls and bytes.
        metrics: counts outcomes.
        access: the access log, None for none.
    """

    def __init__(
        self,
        model: ServedModel,
        max_rows: int,
        lifecycle: Lifecycle,
        batcher: Batcher,
        regions: RegionTable | None,
        clients: ConnectionLimiter,
        metrics: Metrics,
        access: AccessLog | None = None,
    ) -> None:
        self._model = model
        self._decoder = RequestDecoder(model, max_rows)
        self._lifecycle = lifecycle
        self._batcher = batcher
        self._regions = regions
        self._clients = clients
        self._metrics = metrics
        self._access = access
        self._streams: set[InferStreamHandler] = set()

    async def infer(self, data: bytes, context: ServicerContext) -> bytes:
        """Answer `ModelInfer`.

        Args:
            data: the request's bytes.
            context: of the call.

        Returns:
            The response's bytes.
        """
        metadata = dict(context.invocation_metadata() or ())
        origin = CallOrigin(client_of(context), valid_traceparent(metadata.get(names.TRACEPARENT)))
        answer = await self._answer_call(data, context, origin, request_id_of(metadata, ""))
        del data  # gRPC keeps what `abort` raises, and with it this frame, until the garbage collector comes
        if isinstance(answer, RequestError):
            await context.abort(answer.code, answer.message, answer.trailing_metadata)
        return answer

    async def _answer_call(
        self, data: bytes, context: ServicerContext, origin: CallOrigin, request_id: str
    ) -> bytes | RequestError:
        """Return the response to a call, or why it is refused."""
        job = None
        try:
            self._lifecycle.begin_request()
            context.add_done_callback(self._end_request)  # type: ignore[arg-type]  # the stub's type is a class
            client = self._clients.open_call(origin.client)
            context.add_done_callback(lambda _: self._clients.close_call(client))  # type: ignore[arg-type]
            client.hold_bytes(len(data))
            _release_after_call(client, len(data), context)
            request = await self._decode(data, context)
            request_id = request_id or request.plan.id
            job = InferenceJob.of(request, context.time_remaining(), origin.client, len(data), request_id)
            answer = await self._batcher.compute(job)
            client.nbytes += len(answer)
            _release_after_call(client, len(answer), context)
        except RequestError as error:
            self._record_error(error, origin, request_id, len(data), job)
            return error.copy()
        except asyncio.CancelledError:
            self._metrics.record_outcome("cancelled")
            self._log_access(origin, request_id, len(data), job, "CANCELLED")
            raise
        self._metrics.record_outcome("ok")
        self._log_access(origin, request_id, len(data), job, "OK")
        return answer

    async def stream_infer(self, requests: AsyncIterator[bytes], context: ServicerContext) -> None:
        """Answer `ModelStreamInfer`; see `InferStreamHandler`.

        Args:
            requests: the requests' bytes.
            context: of the call.
        """
        regions = self._regions_for(context)
        metadata = dict(context.invocation_metadata() or ())
        origin = CallOrigin(client_of(context), valid_traceparent(metadata.get(names.TRACEPARENT)))
        try:
            slot = StreamSlot(self._clients, origin.client)
        except RequestError as exc:
            self._metrics.record_rejected_call(exc)
            await context.abort(exc.code, exc.message, exc.trailing_metadata)

        async def compute(
            header: bytes, raw: list[memoryview], nbytes: int, request_id: str, error: RequestError | None
        ) -> bytes:
            job = None
            if error is not None:  # raised here it would hold this frame, and so the request, and the frame it
                self._record_error(error, origin, request_id, nbytes, job)
                return encode_error(error, self._model.name, request_id)
            try:
                request = await self._decoder.decode(header, raw, regions)
                timeout_s = _minimum(request.plan.timeout_s, context.time_remaining())
                id_bytes = codec.id_field(request_id) if request_id else b""
                job = InferenceJob.of(request, timeout_s, origin.client, nbytes, request_id, id_bytes)
                answer = await self._batcher.compute(job)
            except RequestError as exc:
                self._record_error(exc, origin, request_id, nbytes, job)
                return encode_error(exc, self._model.name, request_id)
            except asyncio.CancelledError:
                self._log_access(origin, request_id, nbytes, job, "CANCELLED")
                raise
            self._metrics.record_outcome("ok")
            self._log_access(origin, request_id, nbytes, job, "OK")
            return answer

        stream = InferStreamHandler(
            compute,
            lambda: self._metrics.record_outcome("cancelled"),
            self._lifecycle,
            slot,
            metadata,
            context,
            self._model.max_message_bytes,
        )
        self._streams.add(stream)
        try:
            await stream.run(requests)
        finally:
            self._streams.discard(stream)
            slot.close()

    def end_streams(self) -> None:
        """End open streams behind the responses that are under way."""
        for stream in self._streams:
            stream.end()

    def _end_request(self, context: ServicerContext) -> None:
        self._lifecycle.end_request()

    async def _decode(self, data: bytes, context: ServicerContext) -> DecodedRequest:
        try:
            header, raw = codec.split_request(data)
        except ProtocolError as exc:
            raise malformed_message(data, str(exc)) from exc
        return await self._decoder.decode(header, raw, self._regions_for(context))

    def _record_error(
        self, error: RequestError, origin: CallOrigin, request_id: str, nbytes: int, job: InferenceJob | None
    ) -> None:
        self._metrics.record_error(error)
        code = error.code.name
        _log.debug("request %s of %s: %s: %s", quote(request_id), origin.client, code, quote(error.message))
        self._log_access(origin, request_id, nbytes, job, code)

    def _log_access(
        self, origin: CallOrigin, request_id: str, nbytes: int, job: InferenceJob | None, status: str
    ) -> None:
        """Write to the access log, if there is any."""
        if self._access is not None:
            traceparent = (job.request.plan.traceparent if job is not None else "") or origin.traceparent
            self._access.write_request(
                job, status, client=origin.client, id=clip(request_id, 128), traceparent=traceparent, bytes=nbytes
            )

    def _regions_for(self, context: ServicerContext) -> ClientRegions | None:
        return self._regions.regions_of_client(context.peer()) if self._regions is not None else None


def _release_after_call(client: ClientConnection, nbytes: int, context: ServicerContext) -> None:
    """Subtract bytes that a client holds when the call has ended."""

    def give(context: ServicerContext) -> None:
        client.nbytes -= nbytes

    context.add_done_callback(give)  # type: ignore[arg-type]


def _minimum(first_s: float | None, second_s: float | None) -> float | None:
    given = [timeout_s for timeout_s in (first_s, second_s) if timeout_s is not None]
    return min(given, default=None)
