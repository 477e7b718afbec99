"""A stream of a reader's to a server in this process that keeps what it gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, TypeVar

from edl.distill.transport.stream import InferStream
from edl.protocol import names
from edl.protocol.transport import grpc

TIMEOUT_S = 20.0


class StreamServer(Protocol):
    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> None: ...


S = TypeVar("S", bound=StreamServer)


def with_stream(server: S, test: Callable[[InferStream, S], Awaitable[None]], **options: bool) -> None:
    """Run `test` with a stream to `server`, which is opened with `options`."""

    async def run() -> None:
        grpc_server = grpc.aio.server()
        handlers = {"ModelStreamInfer": grpc.stream_stream_rpc_method_handler(server.stream)}
        grpc_server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(names.SERVICE, handlers),))
        port = grpc_server.add_insecure_port("127.0.0.1:0")
        await grpc_server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stream = InferStream(channel, "here", **options)
            await test(stream, server)
            await stream.close()
        await grpc_server.stop(0)

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
