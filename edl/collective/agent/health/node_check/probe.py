"""What one node does in one round of the node check, as a process of its own: a node that fails may hang in it.

Run as `python -m edl.collective.agent.health.node_check.probe`, with its task as JSON in the first argument; prints
JSON lines.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from edl.collective.agent.health.node_check.workload import (
    agree_on_gpus,
    check_copies,
    check_products,
    check_sum,
    find_devices,
)

__all__ = ["main"]


def main(task: dict[str, Any]) -> None:
    """Compute on all devices, say so, meet the partners, reduce, say so.

    Args:
        task: `rank` and `world_size` in the group, `host` and `port` of the first one (port 0: this is it, choose one),
            and `timeout_s`.
    """
    devices = find_devices()
    rank, world_size = task["rank"], task["world_size"]
    if world_size > 1 and rank == 0:
        store = TCPStore(task["host"], 0, is_master=True, wait_for_workers=False, timeout=_timeout(task))
        _say({"port": store.port})
    compute_s = max(check_products(device) for device in devices)
    check_copies(devices)
    _say({"device": devices[0].type, "compute_s": compute_s})
    if world_size == 1:
        _say({"reduce_s": 0.0})
        return
    if rank != 0:
        store = TCPStore(task["host"], task["port"], is_master=False, timeout=_timeout(task))

    def make_group(backend: str, own: Any, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(backend, store=own, rank=rank, world_size=world_size, timeout=_timeout(task))

    gpus = len(devices) if devices[0].type == "cuda" else 0
    common = agree_on_gpus(store, rank, world_size, gpus)
    _say({"reduce_s": check_sum(make_group, store, devices[:common])})


def _timeout(task: dict[str, Any]) -> timedelta:
    return timedelta(seconds=task["timeout_s"])


def _say(words: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
