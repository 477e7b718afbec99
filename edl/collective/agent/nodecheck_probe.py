"""What one node does in one round of the node check, as a process of its own: a node that fails may hang in it.

Run as `python -m edl.collective.agent.nodecheck_probe`, with its task as JSON in the first argument; prints JSON lines.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

_SIZE: Final = {"cpu": 768, "cuda": 8192}
_PRODUCTS: Final = 8
_REDUCED: Final = 4 * 1024 * 1024
"""Numbers of 4 bytes in one all-reduce."""
_REPEATS: Final = 3


def main(task: dict[str, Any]) -> None:
    """Compute, say so, meet the partners, reduce, say so.

    Args:
        task: `rank` and `world_size` in the group, `host` and `port` of the first one (port 0: this is it, choose one),
            and `timeout_s`.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if task["world_size"] > 1 and task["rank"] == 0:
        store = TCPStore(task["host"], 0, is_master=True, wait_for_workers=False, timeout=_timeout(task))
        _say({"port": store.port})
    matrix = torch.ones(_SIZE[device], _SIZE[device], device=device)
    compute_s = _best(lambda: [matrix @ matrix for _ in range(_PRODUCTS)])
    _say({"device": device, "compute_s": compute_s})
    if task["world_size"] == 1:
        _say({"reduce_s": 0.0})
        return
    if task["rank"] != 0:
        store = TCPStore(task["host"], task["port"], is_master=False, timeout=_timeout(task))
    dist.init_process_group(
        "gloo", store=store, rank=task["rank"], world_size=task["world_size"], timeout=_timeout(task)
    )
    numbers = torch.ones(_REDUCED)
    reduce_s = _best(lambda: dist.all_reduce(numbers))
    dist.destroy_process_group()
    _say({"reduce_s": reduce_s})


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of several times, the first one not counted."""
    times = []
    for _ in range(1 + _REPEATS):
        begin = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _timeout(task: dict[str, Any]) -> timedelta:
    return timedelta(seconds=task["timeout_s"])


def _say(words: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
