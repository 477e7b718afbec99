"""What a Paddle trainer finds in its environment: the variables that `python -m paddle.distributed.launch` sets.

All trainers meet at a store that the first of them opens, at `PADDLE_MASTER`; and each has an address of its own, by
which parts of Paddle tell trainers apart. So a node reserves one port for the store and one for each trainer, in a
row: `Node.port` is the first of them. This module imports neither Paddle nor torch.
"""

from __future__ import annotations

import socket
from importlib import metadata

from edl.collective.job_records import Member, World
from edl.errors import EDLError

__all__ = ["ReservedPorts", "has_gpu_build", "paddle_environment"]

_TRIES = 100


def paddle_environment(world: World, member: Member, local_rank: int, *, gpu: bool = False) -> dict[str, str]:
    """What `paddle.distributed.launch` sets for one trainer of collective training.

    Args:
        world: who trains together.
        member: the node.
        local_rank: the trainer on that node.
        gpu: Paddle uses GPUs, one for each trainer; else trainers talk by gloo.
    """
    rank = member.first_rank + local_rank
    endpoints = [f"{node.addr}:{node.port + 1 + each}" for node in world.nodes for each in range(node.local_world_size)]
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
    """Whether the Paddle that is installed is the one for GPUs. It must not be imported before a fork."""
    try:
        metadata.distribution("paddlepaddle-gpu")
    except metadata.PackageNotFoundError:
        return False
    return True


class ReservedPorts:
    """Ports in a row that nobody else is given, until `close`.

    They are bound, but nobody listens, and all sides set `SO_REUSEADDR`: so a trainer of Paddle's can still bind and
    listen, while the kernel gives them to nobody who asks for any free port.

    Attributes:
        port: the first.
    """

    def __init__(self, count: int) -> None:
        """Reserve `count` ports.

        Raises:
            EDLError: there are not so many in a row.
        """
        for _ in range(_TRIES):
            sockets = _row(count)
            if sockets:
                self._sockets = sockets
                self.port: int = sockets[0].getsockname()[1]
                return
        raise EDLError(f"no {count} free ports in a row were found in {_TRIES} tries")

    def close(self) -> None:
        """Give the ports up."""
        for one in self._sockets:
            one.close()


def _row(count: int) -> list[socket.socket]:
    """Sockets bound to consecutive ports, none if a port in the row is taken."""
    row: list[socket.socket] = []
    while len(row) < count:
        one = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            one.bind(("", row[0].getsockname()[1] + len(row) if row else 0))
            # Only now, so that this port is not another one's reservation; from now on a trainer can share it.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except (OSError, OverflowError):
            for each in (*row, one):
                each.close()
            return []
        row.append(one)
    return row
