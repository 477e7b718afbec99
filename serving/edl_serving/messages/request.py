"""Decoding of a `ModelInferRequest`, from bytes to arrays.

Everything that a client can get wrong is refused here or in `request_plan`, before the request waits in a queue, with
the offending name and value. No memory is allocated from a claim: arrays are views of bytes that did arrive. What a
request in fragments claims is counted among its client's bytes before memory is reserved for it (`rpc.stream`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edl.errors import ProtocolError
from edl.protocol import codec
from edl.protocol.tensors import from_raw
from edl_serving.backends.backend import Array
from edl_serving.messages.large_headers import check_large_header
from edl_serving.messages.request_plan import RawContents, RegionSlice, RequestInput, RequestPlan, plan_request
from edl_serving.messages.sequences import check_sequences
from edl_serving.model import ServedModel
from edl_serving.request_error import invalid_argument, quote
from edl_serving.shared_memory.region import SharedMemoryRegion
from edl_serving.shared_memory.regions import ClientRegions

__all__ = ["DecodedRequest", "RequestDecoder"]

_SLOW_TO_READ = 64 << 10  # bytes of typed contents or BYTES, which become objects one by one, or of rows to check
_MAX_CACHED_HEADER = 2048  # bytes: a dozen tensors with options; the cache then takes 2 MB at most
_MAX_CACHED_PLANS = 1024  # as many clients with a header of their own as may be connected as it comes


@dataclass(frozen=True)
class DecodedRequest:
    """A request that can be computed.

    Attributes:
        plan: of its header.
        arrays: the inputs in the model's order, `[rows, *shape]`; views of the message or of shared memory.
        regions: the shared memory that outputs are to be written to, by name.
    """

    plan: RequestPlan
    arrays: tuple[Array, ...]
    regions: dict[str, SharedMemoryRegion]


class RequestDecoder:
    """Decodes requests for a model. Used on the event loop.

    Args:
        model: that is served.
        max_rows: of a request.
    """

    def __init__(self, model: ServedModel, max_rows: int) -> None:
        self._model = model
        self._checks_rows = model.sequence_input is not None or model.checks_inputs
        self._max_rows = max_rows
        self._max_bytes = model.max_message_bytes
        self._has_bytes = any(spec.datatype == "BYTES" for spec in model.inputs)
        self._plans: dict[bytes, RequestPlan] = {}

    async def decode(self, header: bytes, raw: Sequence[memoryview], regions: ClientRegions | None) -> DecodedRequest:
        """Check a request and find its tensors.

        Args:
            header: of `codec.split_request`.
            raw: the raw tensors, of `codec.split_request`.
            regions: shared memory that it may use; None if this client may not.

        Returns:
            The request.

        Raises:
            RequestError: INVALID_ARGUMENT, with the offending name and value.
        """
        plan = self._plans.get(header) if len(header) <= _MAX_CACHED_HEADER else None
        if plan is None:
            slow = len(header) > _SLOW_TO_READ
            plan = await asyncio.to_thread(self._plan, header) if slow else self._plan(header)
        if self._has_bytes and sum(view.nbytes for view in raw) > _SLOW_TO_READ:
            request = await asyncio.to_thread(bind_tensors, plan, raw, regions)
        else:
            request = bind_tensors(plan, raw, regions)
        if not self._checks_rows:
            return request
        if sum(array.nbytes for array in request.arrays) > _SLOW_TO_READ:
            return await asyncio.to_thread(self._check_rows, request)
        return self._check_rows(request)

    def _check_rows(self, request: DecodedRequest) -> DecodedRequest:
        """Return the request, if its rows are sequences and the model takes its values."""
        plan = request.plan
        if plan.uses_shared_memory:  # which its client could change after the check
            request = replace(request, arrays=tuple([array.copy() for array in request.arrays]))
        inputs = {tensor.spec.name: array for tensor, array in zip(plan.inputs, request.arrays, strict=True)}
        if self._model.sequence_input is not None:
            check_sequences(self._model.sequence_input, inputs[self._model.sequence_input], self._model.max_sequence)
        self._model.check_inputs(inputs, plan.options.temperature)
        return request

    def _plan(self, header: bytes) -> RequestPlan:
        try:
            if len(header) > _SLOW_TO_READ:
                check_large_header(header, self._model, self._max_rows, self._max_bytes)
            plan = plan_request(codec.parse_request(header), self._model, self._max_rows)
        except ProtocolError as exc:
            raise invalid_argument(str(exc)) from exc
        if plan.typed is None and len(header) <= _MAX_CACHED_HEADER:
            if len(self._plans) >= _MAX_CACHED_PLANS:
                self._plans.clear()
            self._plans[header] = plan
        return plan


def bind_tensors(plan: RequestPlan, raw: Sequence[memoryview], regions: ClientRegions | None) -> DecodedRequest:
    """Find the tensors of a request in its message and in shared memory.

    Args:
        plan: of the request's header.
        raw: the message's raw tensors.
        regions: see `RequestDecoder.decode`.

    Returns:
        The request.

    Raises:
        RequestError: a tensor is not there, or its bytes do not add up.
    """
    if raw and plan.typed is not None:
        raise invalid_argument(f"input {quote(plan.typed)} has contents, and there are raw_input_contents as well")
    if len(raw) != plan.raw_count:
        _refuse_count(plan, len(raw))
    if plan.uses_shared_memory and regions is None:
        raise invalid_argument("this server takes no shared memory from this client")
    arrays = []
    for tensor in plan.inputs:
        try:
            if isinstance(tensor.source, RawContents):
                arrays.append(from_raw(tensor.spec.datatype, tensor.shape, raw[tensor.source.index]))
            elif isinstance(tensor.source, RegionSlice):
                arrays.append(_from_region(tensor, tensor.source, regions))
            else:
                arrays.append(tensor.source)
        except ProtocolError as exc:
            raise invalid_argument(f"input {quote(tensor.spec.name)}: {exc}") from exc
    targets: dict[str, SharedMemoryRegion] = {}
    for output in plan.outputs:
        if output.place is not None and regions is not None:
            region = targets[output.place.region] = regions[output.place.region]
            region.check_range(output.place.offset, output.place.nbytes)
    return DecodedRequest(plan, tuple(arrays), targets)


def _refuse_count(plan: RequestPlan, count: int) -> None:
    for tensor in plan.inputs:
        if isinstance(tensor.source, RawContents) and tensor.source.index >= count:
            raise invalid_argument(
                f"input {quote(tensor.spec.name)} has no contents ({count} raw_input_contents were sent)"
            )
    raise invalid_argument(
        f"{count} raw_input_contents were sent for {plan.raw_count} inputs that are not in shared memory"
    )


def _from_region(tensor: RequestInput, place: RegionSlice, regions: ClientRegions | None) -> Array:
    assert regions is not None
    return from_raw(tensor.spec.datatype, tensor.shape, regions[place.region].view(place.offset, place.nbytes))
