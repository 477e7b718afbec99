"""A node's work in a round of the node check, as a process of its own: a node that fails may hang in it.

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
    """Compute on all devices, report it, meet the partners, reduce, report it.

    Args:
        task: `rank` and `world_size` in the group, `host` and `port` of the group's first node (port 0 for that node
            itself, which chooses a port), and `timeout_s` in seconds.

    Raises:
        EDLError: a device computes or copies something wrong.
    """
    devices = find_devices()
    rank, world_size = task["rank"], task["world_size"]
    if world_size > 1 and rank == 0:
        store = TCPStore(task["host"], 0, is_master=True, wait_for_workers=False, timeout=_timeout(task))
        _report({"port": store.port})
    compute_s = max(check_products(device) for device in devices)
    check_copies(devices)
    _report({"device": devices[0].type, "compute_s": compute_s})
    if world_size == 1:
        _report({"reduce_s": 0.0})
        return
    if rank != 0:
        store = TCPStore(task["host"], task["port"], is_master=False, timeout=_timeout(task))

    def make_group(backend: str, own: Any, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(backend, store=own, rank=rank, world_size=world_size, timeout=_timeout(task))

    gpus = len(devices) if devices[0].type == "cuda" else 0
    common = agree_on_gpus(store, rank, world_size, gpus)
    _report({"reduce_s": check_sum(make_group, store, devices[:common])})


def _timeout(task: dict[str, Any]) -> timedelta:
    return timedelta(seconds=task["timeout_s"])


def _report(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
