"""Answers KEDA's questions from what advisors have written. Whatever is not known is an error, and never 0."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from edl.background import start_call
from edl.discovery import Store
from edl.errors import ClosedError, DiscoveryError, SettingsError
from edl.load_reporting.wanted import read_wanted
from edl.master.external_scaler.target import ScalerTarget
from edl.protocol.keda import external_scaler as messages
from edl.protocol.transport import grpc
from edl.quoting import quote

__all__ = ["ExternalScalerServicer"]

_SERVICE: Final = "externalscaler.ExternalScaler"
_READ_S: Final = 10.0
"""For an answer of the store, whose own deadline is shorter; KEDA asks again after its `pollingInterval` of 30 s."""
_STREAM_S: Final = 5.0
"""Between two looks for a stream: an advisor decides no more often than every ten seconds."""
_LARGEST: Final = 2**31 - 1  # replicas are an int32 in Kubernetes


class ExternalScalerServicer:
    """The four calls that KEDA makes.

    Args:
        store: where advisors write what is wanted; stays the caller's to close.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def handler(self) -> grpc.GenericRpcHandler:
        """Return what a gRPC server answers calls with."""
        reference = messages.ScaledObjectRef.FromString
        return grpc.method_handlers_generic_handler(
            _SERVICE,
            {
                "IsActive": grpc.unary_unary_rpc_method_handler(
                    self.is_active, reference, messages.IsActiveResponse.SerializeToString
                ),
                "StreamIsActive": grpc.unary_stream_rpc_method_handler(
                    self.stream_is_active, reference, messages.IsActiveResponse.SerializeToString
                ),
                "GetMetricSpec": grpc.unary_unary_rpc_method_handler(
                    self.get_metric_spec, reference, messages.GetMetricSpecResponse.SerializeToString
                ),
                "GetMetrics": grpc.unary_unary_rpc_method_handler(
                    self.get_metrics,
                    messages.GetMetricsRequest.FromString,
                    messages.GetMetricsResponse.SerializeToString,
                ),
            },
        )

    async def is_active(self, request: messages.ScaledObjectRef, context: Any) -> messages.IsActiveResponse:
        """Return whether any are wanted."""
        target = await _parse(request, context)
        return messages.IsActiveResponse(result=await self._read_count(target, context) > 0)

    async def stream_is_active(
        self, request: messages.ScaledObjectRef, context: Any
    ) -> AsyncIterator[messages.IsActiveResponse]:
        """Yield whether any are wanted, at once and whenever it changes; ends with an error when it is not known."""
        target = await _parse(request, context)
        shown: bool | None = None
        while True:
            active = await self._read_count(target, context) > 0
            if active is not shown:
                shown = active
                yield messages.IsActiveResponse(result=active)
            await asyncio.sleep(_STREAM_S)

    async def get_metric_spec(self, request: messages.ScaledObjectRef, context: Any) -> messages.GetMetricSpecResponse:
        """Return the metric: one replica for each that is wanted."""
        target = await _parse(request, context)
        spec = messages.MetricSpec(metricName=target.metric_name, targetSize=1, targetSizeFloat=1.0)
        return messages.GetMetricSpecResponse(metricSpecs=[spec])

    async def get_metrics(self, request: messages.GetMetricsRequest, context: Any) -> messages.GetMetricsResponse:
        """Return how many are wanted."""
        target = await _parse(request.scaledObjectRef, context)
        if request.metricName not in ("", target.metric_name):
            details = f"there is no metric {quote(request.metricName)} here, only {target.metric_name!r}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, details)
        count = await self._read_count(target, context)
        value = messages.MetricValue(metricName=target.metric_name, metricValue=count, metricValueFloat=float(count))
        return messages.GetMetricsResponse(metricValues=[value])

    async def _read_count(self, target: ScalerTarget, context: Any) -> int:
        """Return how many are wanted; ends the call where that is not known."""
        reading = start_call("edl-scaler-read", lambda: read_wanted(self._store, target.kind, target.name))
        try:
            wanted = await asyncio.wait_for(asyncio.wrap_future(reading), _READ_S)
        except (DiscoveryError, ClosedError, TimeoutError, asyncio.TimeoutError) as exc:
            details = f"the store does not tell how many are wanted: {str(exc) or 'no answer'}"
            return int(await context.abort(grpc.StatusCode.UNAVAILABLE, details))
        if wanted is None:
            owner = "service" if target.kind == "teachers" else "job"
            details = (
                f"nothing is known of {target.kind} wanted for {owner} {target.name!r}: no advisor has written it "
                "(does an `edl master` or `edl operator` with the same store run, and has the name a typing error?)"
            )
            return int(await context.abort(grpc.StatusCode.NOT_FOUND, details))
        age_s = time.time() - float(wanted["time"])
        if 0 < target.max_age_s < age_s:
            details = f"what is wanted was written {age_s:.0f} s ago, and maxAgeSeconds is {target.max_age_s:g}"
            return int(await context.abort(grpc.StatusCode.UNAVAILABLE, details))
        return min(int(wanted["count"]), _LARGEST)


async def _parse(request: messages.ScaledObjectRef, context: Any) -> ScalerTarget:
    try:
        return ScalerTarget.parse(request.scalerMetadata)
    except SettingsError as exc:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{request.namespace}/{request.name}: {exc}")
        raise
