"""Does a node's work in one round of the node check, in a separate process because the work may hang on a faulty node.

The process receives its task as JSON in the first argument, and prints JSON lines. A broken device may compute wrong
results without raising an error. The test numbers are small integers, so float32 represents their sums exactly in any
order, and TF32 and bfloat16 represent the factors of the matrix products exactly.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from edl.errors import EDLError

_SIZE: Final = {"cpu": 768, "cuda": 8192}  # rows and columns of a matrix: a product takes milliseconds
_PRODUCTS: Final = 8  # per measurement: enough to measure, and seconds on slow devices
_COPIED: Final = 4 * 1024 * 1024  # elements of 4 bytes in one copy between two GPUs
_REDUCED: Final = 4 * 1024 * 1024  # elements of 4 bytes in one all-reduce
_REPEATS: Final = 3  # measurements, of which the fastest counts, since another process may disturb some


def find_devices() -> list[torch.device]:
    if not torch.cuda.is_available():
        return [torch.device("cpu")]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def check_products(device: torch.device) -> float:
    """Multiply matrices on a device. Returns the duration of the fastest measurement in seconds."""
    size = _SIZE[device.type]
    numbers = torch.arange(size, device=device)
    rows, columns = (numbers % 7 + 1).float(), (numbers % 5 + 1).float()
    left, right = rows[:, None].repeat(1, size), columns[None, :].repeat(size, 1)
    expected = size * rows[:, None] * columns[None, :]

    products: list[torch.Tensor] = []

    def multiply() -> None:
        products[:] = [torch.matmul(left, right) for _ in range(_PRODUCTS)]

    def compare() -> None:
        for product in products:
            _compare(product, expected, f"{device}: a matrix product")

    return _best(multiply, compare, device)


def check_copies(devices: Sequence[torch.device]) -> None:
    for source in range(len(devices)):
        sent = torch.arange(_COPIED, dtype=torch.int32, device=devices[source])
        for target in range(len(devices)):
            if target == source:
                continue
            received = torch.zeros(_COPIED, dtype=torch.int32, device=devices[target])
            received.copy_(sent)
            expected = torch.arange(_COPIED, dtype=torch.int32, device=devices[target])
            _compare(received, expected, f"GPU {source} to GPU {target}: a copy")


def agree_on_gpus(store: Store, rank: int, world_size: int, mine: int) -> int:
    """Return the lowest number of GPUs of a rank, which is how many all-reduces NCCL makes; 0 if a rank has no NCCL."""
    store.set(f"gpus/{rank}", str(mine if dist.is_nccl_available() else 0))
    return min(int(store.get(f"gpus/{other}")) for other in range(world_size))


def check_sum(store: Store, rank: int, world_size: int, devices: Sequence[torch.device], timeout_s: float) -> float:
    """Measure all-reduces on each device or the CPU, in a process group each. Returns the slowest device's seconds."""
    times, timeout = [], timedelta(seconds=timeout_s)
    for number, device in enumerate(devices or [torch.device("cpu")]):
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend, own = "nccl" if device.type == "cuda" else "gloo", PrefixStore(f"sum/{number}", store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=world_size, timeout=timeout)
        times.append(_sum(device))
        dist.destroy_process_group()
    return max(times)


def _sum(device: torch.device) -> float:
    rank, size = dist.get_rank(), dist.get_world_size()
    pattern = (torch.arange(_REDUCED, device=device) % 1000).float()
    numbers, expected = torch.empty_like(pattern), pattern * (size * (size + 1) / 2)

    def reduce() -> None:
        torch.mul(pattern, rank + 1, out=numbers)
        dist.all_reduce(numbers)

    def compare() -> None:
        _compare(numbers, expected, f"{device}: a sum over {size} nodes")

    return _best(reduce, compare, device)


def _compare(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    wrong = int((found != expected).sum())
    if wrong:
        raise EDLError(f"{what} has {wrong} of {found.numel()} numbers wrong")


def _best(work: Callable[[], object], check: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest measurement after a warm-up that does not count, and check all results."""
    times = []
    for _ in range(1 + _REPEATS):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
        check()
    return min(times[1:])


def main(task: dict[str, Any]) -> None:
    """Compute on all devices and report the results. Then meet the partners, run the all-reduces, and report again."""
    devices = find_devices()
    compute_s = max(check_products(device) for device in devices)
    check_copies(devices)
    _report({"device": devices[0].type, "compute_s": compute_s})
    world_size = task["world_size"]
    if world_size == 1:
        _report({"reduce_s": 0.0})
        return
    rank, timeout_s = task["rank"], task["timeout_s"]
    store = TCPStore(task["host"], task["port"], is_master=False, timeout=timedelta(seconds=timeout_s))
    common = agree_on_gpus(store, rank, world_size, len(devices) if devices[0].type == "cuda" else 0)
    _report({"reduce_s": check_sum(store, rank, world_size, devices[:common], timeout_s)})


def _report(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    os._exit(0)  # everything is reported, and NCCL may hang when the interpreter ends
