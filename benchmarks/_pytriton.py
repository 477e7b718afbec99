"""The `reader` benchmark's peers: NVIDIA's PyTriton over gRPC and over system shared memory.

Runs as a `Child` in `.tools/triton`'s Python, and starts Triton from `tools/triton_server.py` with a model that
computes nothing. Each client is used in its fastest way: several requests in flight, from threads with the synchronous
client or from the asynchronous one, regions registered once and reused, and outputs read in place where the client
allows it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tritonclient.grpc as sync_client
import tritonclient.grpc.aio as aio_client
import tritonclient.utils.shared_memory as shm

from benchmarks._child import ROOT, WARM_UP_S, Window, answer, processes
from benchmarks._load import CLASSES, DTYPES, IMAGE, ROTATION, ROWS, request_nbytes

_OUT_BYTES = ROWS * CLASSES * 4
_TRITON_TYPES = {"uint8": "UINT8", "float32": "FP32"}


def batches(dtype: str) -> list[Any]:
    """Return prebuilt batches that take turns."""
    return [np.full((ROWS, *IMAGE), number, dtype) for number in range(ROTATION)]


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def tensor(dtype: str, module: Any) -> Any:
    """Return the request's input, without data."""
    return module.InferInput("image", [ROWS, *IMAGE], _TRITON_TYPES[dtype])


async def grpc_aio(endpoint: str, dtype: str, in_flight: int, seconds: float, window: Window) -> None:
    """Send arrays in requests, with the asynchronous client."""
    async with aio_client.InferenceServerClient(endpoint) as client:

        async def worker(number: int) -> None:
            data = batches(dtype)
            while not window.closed:
                number += 1
                image = tensor(dtype, aio_client)
                image.set_data_from_numpy(data[number % ROTATION])
                found = await client.infer(dtype, [image])
                assert found.as_numpy("logits").shape == (ROWS, CLASSES)
                window.requests += 1

        workers = [asyncio.ensure_future(worker(number)) for number in range(in_flight)]
        await asyncio.sleep(WARM_UP_S)
        window.open()
        await asyncio.sleep(seconds)
        window.close()
        await asyncio.gather(*workers)


class GrpcSlot:
    """Sends one request at a time, with arrays in it, through the synchronous client."""

    def __init__(self, endpoint: str, dtype: str) -> None:
        self._client = sync_client.InferenceServerClient(endpoint)
        self._dtype = dtype
        self._data = batches(dtype)

    def once(self, number: int) -> None:
        """Send a request, and check the answer."""
        image = tensor(self._dtype, sync_client)
        image.set_data_from_numpy(self._data[number % ROTATION])
        assert self._client.infer(self._dtype, [image]).as_numpy("logits").shape == (ROWS, CLASSES)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
        self._client.close()


class SharedMemorySlot:
    """Sends one request at a time, with arrays in its own regions, through the synchronous client."""

    def __init__(self, endpoint: str, dtype: str) -> None:
        self._client = sync_client.InferenceServerClient(endpoint)
        self._dtype = dtype
        self._data = batches(dtype)
        key = f"edl-bench-{os.getpid()}-{id(self)}"
        nbytes = request_nbytes(dtype)
        self._sent = shm.create_shared_memory_region(f"{key}-in", f"/{key}-in", nbytes)
        self._got = shm.create_shared_memory_region(f"{key}-out", f"/{key}-out", _OUT_BYTES)
        self._client.register_system_shared_memory(f"{key}-in", f"/{key}-in", nbytes)
        self._client.register_system_shared_memory(f"{key}-out", f"/{key}-out", _OUT_BYTES)
        self._image = tensor(dtype, sync_client)
        self._image.set_shared_memory(f"{key}-in", nbytes)
        self._logits = sync_client.InferRequestedOutput("logits")
        self._logits.set_shared_memory(f"{key}-out", _OUT_BYTES)

    def once(self, number: int) -> None:
        """Copy a batch into the region, send a request, and check the answer."""
        shm.set_shared_memory_region(self._sent, [self._data[number % ROTATION]])
        self._client.infer(self._dtype, [self._image], outputs=[self._logits])
        found = shm.get_contents_as_numpy(self._got, np.float32, [ROWS, CLASSES])
        assert found[0, 0] == 1.0

    def close(self) -> None:
        """Free the regions. The server has ended by then, or forgets them by itself."""
        self._client.close()
        shm.destroy_shared_memory_region(self._sent)
        shm.destroy_shared_memory_region(self._got)


def threads(slots: Sequence[GrpcSlot | SharedMemorySlot], seconds: float, window: Window) -> None:
    """Run a thread for each slot that sends requests repeatedly."""
    failed: list[BaseException] = []
    lock = threading.Lock()

    def worker(slot: GrpcSlot | SharedMemorySlot) -> None:
        try:
            for number in itertools.count():
                if window.closed:
                    return
                slot.once(number)
                with lock:
                    window.requests += 1
        except BaseException as exc:  # noqa: BLE001 - raised again by the waiting thread
            failed.append(exc)

    threads = [threading.Thread(target=worker, args=(slot,)) for slot in slots]
    for thread in threads:
        thread.start()
    time.sleep(WARM_UP_S)
    window.open()
    time.sleep(seconds)
    window.close()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def main() -> None:
    """Start one Triton for each dtype, then measure on request."""
    servers = {}
    endpoints = {}
    for dtype in DTYPES:
        port = free_port()
        shape = ",".join(map(str, IMAGE))
        command = [sys.executable, str(ROOT / "tools/triton_server.py"), "--name", dtype, "--function", "constant"]
        command += ["--grpc-port", str(port), "--http-port", str(free_port()), "--max-batch", str(ROWS)]
        command += ["--input", f"image:{dtype}:{shape}", "--output", f"logits:float32:{CLASSES}"]
        servers[dtype] = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        endpoints[dtype] = f"127.0.0.1:{port}"
    for server in servers.values():
        assert server.stdout is not None
        for line in server.stdout:
            if line.startswith(b"READY"):
                break
        else:
            raise SystemExit("Triton did not start")
        threading.Thread(target=server.stdout.read, daemon=True).start()  # so that its log never fills the pipe

    slots: dict[tuple[str, str], list[GrpcSlot | SharedMemorySlot]] = {}

    def handle(request: dict[str, Any]) -> dict[str, float]:
        dtype, way, in_flight, seconds = (request[name] for name in ("dtype", "way", "in_flight", "seconds"))
        window = Window([os.getpid(), *processes(servers[dtype].pid)])
        if way == "grpc_aio":
            asyncio.run(grpc_aio(endpoints[dtype], dtype, in_flight, seconds, window))
        else:
            kept = slots.setdefault((way, dtype), [])
            while len(kept) < in_flight:
                kept.append((GrpcSlot if way == "grpc_threads" else SharedMemorySlot)(endpoints[dtype], dtype))
            threads(kept[:in_flight], seconds, window)
        return window.figures(ROWS)

    try:
        answer(handle)
    finally:
        for server in servers.values():
            server.terminate()
        for server in servers.values():
            server.wait(20)
        for kept in slots.values():
            for slot in kept:
                slot.close()


if __name__ == "__main__":
    main()
