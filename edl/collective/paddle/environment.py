"""The environment of a Paddle trainer: the variables that `python -m paddle.distributed.launch` sets.

All trainers meet at a store that the first of them opens, at `PADDLE_MASTER`; and a trainer has an address of its own,
by which parts of Paddle tell trainers apart. So a node reserves a port for the store and a port for every trainer, in a
row: `Node.port` is the first of them. This module imports neither Paddle nor torch.
"""

from __future__ import annotations

import socket
from importlib import metadata

from edl.collective.job_records import Member, World
from edl.errors import EDLError

__all__ = ["ReservedPorts", "has_gpu_build", "paddle_environment"]

_TRIES = 100  # rows of free ports are the rule; on a host without any, this still ends within a second


def paddle_environment(world: World, member: Member, local_rank: int, *, gpu: bool = False) -> dict[str, str]:
    """Return what `paddle.distributed.launch` sets for a trainer of collective training.

    Args:
        world: the nodes that train together.
        member: the node.
        local_rank: the trainer on that node.
        gpu: Paddle uses GPUs, one per trainer; else trainers communicate by gloo.
    """
    rank = member.first_rank + local_rank
    endpoints = [
        f"{node.addr}:{node.port + 1 + place}" for node in world.nodes for place in range(node.local_world_size)
    ]
    first = world.nodes[0]
    return {
        "PADDLE_MASTER": f"{first.addr}:{first.port}",
        "MASTER_ADDR": first.addr,  # which Paddle reads first
        "MASTER_PORT": str(first.port),
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(world.size),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_GLOBAL_RANK": str(rank),
        "PADDLE_GLOBAL_SIZE": str(world.size),
        "PADDLE_LOCAL_RANK": str(local_rank),
        "PADDLE_RANK_IN_NODE": str(local_rank),
        "PADDLE_LOCAL_SIZE": str(member.local_world_size),
        "PADDLE_NNODES": str(len(world.nodes)),
        **({"FLAGS_selected_gpus": str(local_rank)} if gpu else {"PADDLE_DISTRI_BACKEND": "gloo"}),
    }


def has_gpu_build() -> bool:
    """Return whether the Paddle that is installed is built for GPUs. It must not be imported before a fork."""
    try:
        metadata.distribution("paddlepaddle-gpu")
    except metadata.PackageNotFoundError:
        return False
    return True


class ReservedPorts:
    """Ports in a row that the kernel gives to no other process, until `close`.

    They are bound, but not listened at, and all sides set `SO_REUSEADDR`: so a trainer of Paddle's can still bind and
    listen, while the kernel gives them to no process that asks for any free port.

    Args:
        count: of the ports.

    Attributes:
        port: the first.

    Raises:
        EDLError: there are not so many in a row.
    """

    def __init__(self, count: int) -> None:
        for _ in range(_TRIES):
            sockets = _row(count)
            if sockets:
                self._sockets = sockets
                self.port: int = sockets[0].getsockname()[1]
                return
        raise EDLError(f"no {count} free ports in a row were found in {_TRIES} tries")

    def close(self) -> None:
        """Give the ports up."""
        for reserved in self._sockets:
            reserved.close()


def _row(count: int) -> list[socket.socket]:
    """Return sockets bound to consecutive ports, none if a port in the row is taken."""
    row: list[socket.socket] = []
    while len(row) < count:
        bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            bound.bind(("", row[0].getsockname()[1] + len(row) if row else 0))
            # Only now, so that this port is not reserved by another process; from now on a trainer can share it.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except (OSError, OverflowError):
            for reserved in (*row, bound):
                reserved.close()
            return []
        row.append(bound)
    return row
