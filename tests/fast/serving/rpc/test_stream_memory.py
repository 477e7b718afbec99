"""What memory of requests an open stream keeps."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from edl.protocol import bundles, codec, names
from edl_serving import ServerSettings
from edl_serving.lifecycle import Lifecycle, ServerState
from edl_serving.rpc.clients import ConnectionLimiter, StreamSlot
from edl_serving.rpc.stream import InferStreamHandler

TIMEOUT_S = 30.0


class Context:
    """A call that counts the messages written to it."""

    def __init__(self) -> None:
        self.written = 0

    async def write(self, message: bytes) -> None:
        self.written += 1


@pytest.mark.parametrize("state", [ServerState.READY, ServerState.STARTING])
def test_stream_forgets_its_last_request(state: ServerState) -> None:
    context: Any = Context()

    async def compute(*_: Any) -> bytes:
        return b"answer"

    async def wait_unreferenced(data: bytes, written: int) -> None:
        references = 3  # the caller's name, this frame's, and the argument of `getrefcount`
        while context.written < written or sys.getrefcount(data) > references:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.001)

    async def requests() -> AsyncIterator[bytes]:
        for written in (1, 2):
            parts = [codec.join_request(codec.id_field(str(written)), [bytes(1000)])]
            data = parts.pop() if written == 1 else bundles.join_requests(parts)
            yield data
            await wait_unreferenced(data, written)

    async def run() -> None:
        settings = ServerSettings(model="m")
        slot = StreamSlot(ConnectionLimiter(settings), "client")
        metadata = {names.UNORDERED: "1", names.BUNDLES: "1"}
        lifecycle = Lifecycle()
        lifecycle.state = state  # a server that starts refuses the requests
        handler = InferStreamHandler(compute, lambda: None, lifecycle, slot, metadata, context, 1 << 20)
        await asyncio.wait_for(handler.run(requests()), TIMEOUT_S)
        slot.close()

    asyncio.run(run())
