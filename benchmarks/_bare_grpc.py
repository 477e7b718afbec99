"""The `reader` benchmark's peer: a bare `grpc.aio` client and server that exchange the same bytes, in two processes.

It uses no protobuf, arrays or model: prebuilt bytes are answered with prebuilt bytes. Runs as a `Child`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import subprocess
import sys
import time
from typing import Any

import grpc

from benchmarks._child import WARM_UP_S, Window, answer, processes
from benchmarks._load import CLASSES, ROTATION, ROWS, request_nbytes

_METHOD = "/bare/Infer"
_LOOK_S = 0.1
_LIMITS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


async def serve() -> None:
    """Print the port, and answer requests until standard input is closed."""
    answer_bytes = bytes(ROWS * CLASSES * 4)

    async def infer(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return answer_bytes

    server = grpc.aio.server(options=_LIMITS)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"Infer": grpc.unary_unary_rpc_method_handler(infer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(0)


async def measure(
    endpoint: str, dtype: str, in_flight: int, seconds: float, counted: bool = False, pace_s: float = 0.0
) -> dict[str, float]:
    """Return the rows per second, and the resources that both processes used.

    Args:
        counted: See `Window`.
        pace_s: Least seconds between the beginnings of two requests of one worker.
    """
    requests = [bytes([number]) * request_nbytes(dtype) for number in range(ROTATION)]
    window = Window(processes(os.getpid()), counted=counted)
    async with grpc.aio.insecure_channel(endpoint, options=_LIMITS) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_METHOD)

        async def worker(first: int) -> None:
            for number in itertools.count(first):
                if window.closed:
                    return
                begun = time.perf_counter()
                response = await call(requests[number % ROTATION])
                assert len(response) == ROWS * CLASSES * 4
                window.requests += 1
                if pace_s:
                    await asyncio.sleep(begun + pace_s - time.perf_counter())

        workers = [asyncio.ensure_future(worker(number)) for number in range(in_flight)]
        await asyncio.sleep(WARM_UP_S)
        window.open()
        before = window.requests
        await asyncio.sleep(seconds)
        while window.requests == before:  # noqa: ASYNC110 - under callgrind a single request may take longer
            await asyncio.sleep(_LOOK_S)
        window.close()
        await asyncio.gather(*workers)
    return window.figures(ROWS)


def main() -> None:
    """Run the benchmark's client, or with `--serve` its server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true")
    if parser.parse_args().serve:
        asyncio.run(serve())
        return
    with subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        endpoint = f"127.0.0.1:{int(server.stdout.readline())}"

        def handle(request: dict[str, Any]) -> dict[str, float]:
            return asyncio.run(measure(endpoint, **request))

        answer(handle)


if __name__ == "__main__":
    main()
