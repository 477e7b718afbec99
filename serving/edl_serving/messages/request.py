"""A `ModelInferRequest` from bytes to arrays.

Everything that a client can get wrong is refused here or in `request_plan`, before the request waits in a queue, with
the offending name and value. Nothing is allocated from a claim: arrays are views of bytes that did arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from edl.errors import ProtocolError
from edl.protocol import codec
from edl.protocol.tensors import from_raw
from edl_serving.backends.backend import Array
from edl_serving.messages.large_headers import check_large
from edl_serving.messages.request_plan import Input, Place, Plan, Raw, make_plan
from edl_serving.model import Model
from edl_serving.request_error import invalid, quote
from edl_serving.shared_memory.region import Region
from edl_serving.shared_memory.regions import ClientRegions

__all__ = ["Request", "RequestReader"]

_SLOW_TO_READ = 64 << 10  # bytes of typed contents or BYTES, which become Python objects one by one
_MAX_CACHED_HEADER = 2048
_MAX_CACHED_PLANS = 1024


@dataclass(frozen=True)
class Request:
    """A request that can be computed.

    Attributes:
        arrays: the inputs in the model's order, `[rows, *shape]` each; views of the message or of shared memory.
        regions: the shared memory that outputs are to be written to, by name.
    """

    plan: Plan
    arrays: tuple[Array, ...]
    regions: dict[str, Region]


class RequestReader:
    """Reads requests for one model. Used on the event loop.

    Args:
        max_rows: of one request.
    """

    def __init__(self, model: Model, max_rows: int) -> None:
        self._model = model
        self._max_rows = max_rows
        self._max_bytes = model.max_message_bytes
        self._has_bytes = any(spec.datatype == "BYTES" for spec in model.inputs)
        self._plans: dict[bytes, Plan] = {}

    async def read(self, header: bytes, raw: Sequence[memoryview], regions: ClientRegions | None) -> Request:
        """Check a request and find its tensors.

        Args:
            header, raw: of `codec.split_request`.
            regions: shared memory that it may use; None if this client may not.

        Raises:
            Refusal: INVALID_ARGUMENT, with the offending name and value.
        """
        plan = self._plans.get(header) if len(header) <= _MAX_CACHED_HEADER else None
        if plan is None:
            slow = len(header) > _SLOW_TO_READ
            plan = await asyncio.to_thread(self._plan, header) if slow else self._plan(header)
        if self._has_bytes and sum(view.nbytes for view in raw) > _SLOW_TO_READ:
            return await asyncio.to_thread(bind, plan, raw, regions)
        return bind(plan, raw, regions)

    def _plan(self, header: bytes) -> Plan:
        try:
            if len(header) > _SLOW_TO_READ:
                check_large(header, self._model, self._max_rows, self._max_bytes)
            plan = make_plan(codec.parse_request(header), self._model, self._max_rows)
        except ProtocolError as exc:
            raise invalid(str(exc)) from exc
        if plan.typed is None and len(header) <= _MAX_CACHED_HEADER:
            if len(self._plans) >= _MAX_CACHED_PLANS:
                self._plans.clear()
            self._plans[header] = plan
        return plan


def bind(plan: Plan, raw: Sequence[memoryview], regions: ClientRegions | None) -> Request:
    """Find the tensors of `plan` in `raw` and in shared memory.

    Raises:
        Refusal: they are not there, or their bytes do not add up.
    """
    if raw and plan.typed is not None:
        raise invalid(f"input {quote(plan.typed)} has contents, and there are raw_input_contents as well")
    if len(raw) != plan.raw_count:
        _refuse_count(plan, len(raw))
    if plan.uses_shared_memory and regions is None:
        raise invalid("this server takes no shared memory from this client")
    arrays = []
    for one in plan.inputs:
        try:
            if isinstance(one.source, Raw):
                arrays.append(from_raw(one.spec.datatype, one.shape, raw[one.source.index]))
            elif isinstance(one.source, Place):
                arrays.append(_from_region(one, one.source, regions))
            else:
                arrays.append(one.source)
        except ProtocolError as exc:
            raise invalid(f"input {quote(one.spec.name)}: {exc}") from exc
    targets: dict[str, Region] = {}
    for output in plan.outputs:
        if output.place is not None and regions is not None:
            region = targets[output.place.region] = regions[output.place.region]
            region.check(output.place.offset, output.place.nbytes)
    return Request(plan, tuple(arrays), targets)


def _refuse_count(plan: Plan, count: int) -> None:
    for one in plan.inputs:
        if isinstance(one.source, Raw) and one.source.index >= count:
            raise invalid(f"input {quote(one.spec.name)} has no contents ({count} raw_input_contents were sent)")
    raise invalid(f"{count} raw_input_contents were sent for {plan.raw_count} inputs that are not in shared memory")


def _from_region(one: Input, place: Place, regions: ClientRegions | None) -> Array:
    assert regions is not None
    return from_raw(one.spec.datatype, one.shape, regions[place.region].view(place.offset, place.nbytes))
