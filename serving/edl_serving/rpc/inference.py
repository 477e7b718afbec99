"""`ModelInfer` and `ModelStreamInfer`: from a message's bytes to the answer's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import NamedTuple

from edl.errors import ProtocolError
from edl.protocol import codec, names
from edl_serving.batching.batcher import Batcher
from edl_serving.batching.job import Job
from edl_serving.lifecycle import Lifecycle
from edl_serving.messages.request import Request, RequestReader
from edl_serving.messages.trace_context import checked_traceparent, request_id_of
from edl_serving.model import Model
from edl_serving.monitoring.metrics import Metrics
from edl_serving.request_error import Refusal, clip, malformed, quote
from edl_serving.rpc.access_log import AccessLog
from edl_serving.rpc.clients import Client, Clients, Context, StreamPlace, client_of
from edl_serving.rpc.stream import Stream, refused
from edl_serving.shared_memory.regions import ClientRegions, Regions

__all__ = ["Context", "Inference"]

_log = logging.getLogger(__name__)


class Origin(NamedTuple):
    """Of a call: who made it, and the span that it is part of, if it told one."""

    client: str
    traceparent: str


class Inference:
    """Computes requests.

    Args:
        max_rows: of one request.
        regions: registered shared memory, None where it is turned off.
        access: a line for each request, None for none.
    """

    def __init__(
        self,
        model: Model,
        max_rows: int,
        lifecycle: Lifecycle,
        batcher: Batcher,
        regions: Regions | None,
        clients: Clients,
        metrics: Metrics,
        access: AccessLog | None = None,
    ) -> None:
        self._model = model
        self._reader = RequestReader(model, max_rows)
        self._lifecycle = lifecycle
        self._batcher = batcher
        self._regions = regions
        self._clients = clients
        self._metrics = metrics
        self._access = access
        self._streams: set[Stream] = set()

    async def unary(self, data: bytes, context: Context) -> bytes:
        """`ModelInfer`."""
        metadata = dict(context.invocation_metadata() or ())
        origin = Origin(client_of(context), checked_traceparent(metadata.get(names.TRACEPARENT)))
        request_id, job = request_id_of(metadata, ""), None
        try:
            self._lifecycle.enter()
            context.add_done_callback(self._left)  # type: ignore[arg-type]  # the stub's type is a class
            client = self._clients.enter(origin.client)
            context.add_done_callback(lambda _: self._clients.leave(client))  # type: ignore[arg-type]
            client.take(len(data))
            _give_back(client, len(data), context)
            request = await self._read(data, context)
            request_id = request_id or request.plan.id
            job = Job.of(request, context.time_remaining(), origin.client, len(data), request_id)
            answer = await self._batcher.compute(job)
            client.nbytes += len(answer)
            _give_back(client, len(answer), context)
        except Refusal as refusal:
            self._refused(refusal, origin, request_id, len(data), job)
            await context.abort(refusal.code, refusal.message, refusal.trailing_metadata)
        except asyncio.CancelledError:
            self._metrics.answered("cancelled")
            self._note(origin, request_id, len(data), job, "CANCELLED")
            raise
        self._metrics.answered("ok")
        self._note(origin, request_id, len(data), job, "OK")
        return answer

    async def stream(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """`ModelStreamInfer`; see `Stream`."""
        regions = self._regions_for(context)
        metadata = dict(context.invocation_metadata() or ())
        origin = Origin(client_of(context), checked_traceparent(metadata.get(names.TRACEPARENT)))
        try:
            place = StreamPlace(self._clients, origin.client)
        except Refusal as exc:
            self._metrics.turned_away(exc)
            await context.abort(exc.code, exc.message, exc.trailing_metadata)

        async def compute(
            header: bytes, raw: list[memoryview], nbytes: int, request_id: str, refusal: Refusal | None
        ) -> bytes:
            job = None
            try:
                if refusal is not None:
                    raise refusal
                request = await self._reader.read(header, raw, regions)
                timeout_s = _least(request.plan.timeout_s, context.time_remaining())
                id_bytes = codec.id_field(request_id) if request_id else b""
                job = Job.of(request, timeout_s, origin.client, nbytes, request_id, id_bytes)
                answer = await self._batcher.compute(job)
            except Refusal as exc:
                self._refused(exc, origin, request_id, nbytes, job)
                return refused(exc, self._model.name, request_id)
            except asyncio.CancelledError:
                self._note(origin, request_id, nbytes, job, "CANCELLED")
                raise
            self._metrics.answered("ok")
            self._note(origin, request_id, nbytes, job, "OK")
            return answer

        stream = Stream(compute, lambda: self._metrics.answered("cancelled"), self._lifecycle, place, metadata, context)
        self._streams.add(stream)
        try:
            await stream.run(requests)
        finally:
            self._streams.discard(stream)
            place.close()

    def end_streams(self) -> None:
        """End open streams; an answer that is on its way still comes first."""
        for stream in self._streams:
            stream.end()

    def _left(self, context: Context) -> None:
        self._lifecycle.leave()

    async def _read(self, data: bytes, context: Context) -> Request:
        try:
            header, raw = codec.split_request(data)
        except ProtocolError as exc:
            raise malformed(data, str(exc)) from exc
        return await self._reader.read(header, raw, self._regions_for(context))

    def _refused(self, refusal: Refusal, origin: Origin, request_id: str, nbytes: int, job: Job | None) -> None:
        self._metrics.refused(refusal)
        code = refusal.code.name
        _log.debug("request %s of %s: %s: %s", quote(request_id), origin.client, code, quote(refusal.message))
        self._note(origin, request_id, nbytes, job, code)

    def _note(self, origin: Origin, request_id: str, nbytes: int, job: Job | None, status: str) -> None:
        """Write to the access log, if there is one."""
        if self._access is not None:
            traceparent = (job.request.plan.traceparent if job is not None else "") or origin.traceparent
            self._access.add(
                job, status, client=origin.client, id=clip(request_id, 128), traceparent=traceparent, bytes=nbytes
            )

    def _regions_for(self, context: Context) -> ClientRegions | None:
        return self._regions.of_client(context.peer()) if self._regions is not None else None


def _give_back(client: Client, nbytes: int, context: Context) -> None:
    """Let bytes that a client holds go when the call has ended."""

    def give(context: Context) -> None:
        client.nbytes -= nbytes

    context.add_done_callback(give)  # type: ignore[arg-type]


def _least(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else min(one, other)
