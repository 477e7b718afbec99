"""The specification of a node's agent, and the environment of its workers: torchrun's variables and EDL's own.

All trainers meet at a store that the first of them opens, at `PADDLE_MASTER`; and a trainer has an address of its own,
by which parts of Paddle tell trainers apart. So a node reserves a port for the store and a port for every trainer, in a
row: `Node.port` is the first of them. This module imports neither Paddle nor torch.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from edl.collective.agent.health.hangs import HangLimits
from edl.collective.agent.health.node_check import NodeCheckSettings
from edl.collective.agent.host_folder import HostFolder
from edl.collective.agent.processes.zygote import ForkRequest, ProgramSpec
from edl.collective.agent.rendezvous import RendezvousSettings
from edl.collective.job_records import Member, World
from edl.errors import EDLError

if TYPE_CHECKING:
    from edl.protocol.tls.peers import PeerTLS  # imported where TLS is asked for only

__all__ = [
    "LaunchSpec",
    "MasterEndpoint",
    "ReservedPorts",
    "error_files",
    "has_gpu_build",
    "open_master_endpoint",
    "paddle_environment",
    "worker_environment",
    "worker_forks",
]


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


# --- The specification of a node's agent, and the environment of its workers ---


class MasterEndpoint(Protocol):
    """Where the ranks of a generation meet: torch's MASTER_PORT, held open for as long as the object lives."""

    @property
    def port(self) -> int:
        """The port, for the other nodes."""
        ...


@dataclass(frozen=True)
class LaunchSpec:
    """One node's part of a job.

    Attributes:
        job: the name that all nodes share (torchrun's `--rdzv-id`).
        store: URL of the store, in which a job has its name.
        program: what the workers run.
        workers: how many on this node.
        rendezvous: how a world is formed.
        addr: where other nodes' workers reach this node.
        ttl_s: after this long without a sign of life the others go on without this node.
        join_timeout_s: how long to wait for enough nodes.
        grace_s: how long workers may take to end after the signal that asked this node to leave, before SIGKILL.
        max_restarts: how often the job goes on after an error of the script's own, whichever node it was on.
        checkpoint: fsspec URL of the storage, empty for none; written every `checkpoint_interval_s`.
        hang: how long workers may go without a step before they are started again.
        readmit: whether to join although the job leaves this host out since a GPU of it failed.
        check: how to test the node before it joins, None not to.
        logs: a `torch.distributed.elastic.multiprocessing.LogsSpecs`: where the workers' output goes.
        environ: added to the workers' environment.
        tls: for connections between agents, None for none.
        resumable: whether the job has a name by which it can be started again; its state is kept in memory only then.
            Without one no other node can join, so that this one goes on however long the store does not answer.
        command: a digest of the script and its arguments if the job has no name, by which states in memory that another
            command left are told apart; empty if the name does that.
        framework: what the workers train with, `torch` or `paddle`.
        role: torchrun's `--role`, which begins the lines of `--tee`.
        slurm: whether this node is a task of a Slurm step, and signals are Slurm's.
        leave_on_oom: whether this node leaves the job, for a start with more memory, when the kernel killed a worker of
            it for want of memory, and does not start its workers again.
        termination_log: the file that shall say what ended this node, empty for none.
    """

    job: str
    program: ProgramSpec
    workers: int
    rendezvous: RendezvousSettings
    addr: str
    store: str = ""
    ttl_s: float = 1.5
    join_timeout_s: float = 600.0
    grace_s: float = 30.0
    max_restarts: int = 0
    checkpoint: str = ""
    checkpoint_interval_s: float = 300.0
    role: str = "default"
    hang: HangLimits = field(default_factory=HangLimits)
    readmit: bool = False
    check: NodeCheckSettings | None = None
    logs: Any = None
    environ: Mapping[str, str] = field(default_factory=dict)
    tls: PeerTLS | None = None
    framework: str = "torch"
    resumable: bool = True
    command: str = ""
    slurm: bool = False
    leave_on_oom: bool = False
    termination_log: str = ""


def open_master_endpoint(spec: LaunchSpec) -> MasterEndpoint:
    """Open a place where the ranks of a single generation meet: addresses of an older generation must not be found.

    Returns:
        A store for torch; for Paddle, whose first trainer opens a store, ports that are kept free.
    """
    if spec.framework == "paddle":
        return ReservedPorts(spec.workers + 1)
    store: MasterEndpoint = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return store


def worker_environment(spec: LaunchSpec, world: World, member: Member, local_rank: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a worker, with the generation as the restart count."""
    rank = member.first_rank + local_rank
    first = world.nodes[0]
    paddle = spec.framework == "paddle"
    return {
        "LOCAL_RANK": str(local_rank),
        "RANK": str(rank),
        "GROUP_RANK": str(world.position(member.id)),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": str(member.local_world_size),
        "WORLD_SIZE": str(world.size),
        "GROUP_WORLD_SIZE": str(len(world.nodes)),
        "ROLE_WORLD_SIZE": str(world.size),
        "MASTER_ADDR": first.addr,
        "MASTER_PORT": str(first.port),
        "TORCHELASTIC_RESTART_COUNT": str(world.generation),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.job,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "EDL_GENERATION": str(world.generation),
        **(paddle_environment(world, member, local_rank, gpu=has_gpu_build()) if paddle else {}),
        **_threads(world, member),
        **spec.environ,
    }


def _threads(world: World, member: Member) -> dict[str, str]:
    """Share a host's cores out among the workers of several nodes on it, where the user has not said how.

    A worker would start as many threads as there are cores, and OpenMP's threads wait by spinning: on two cores, two
    workers of two threads take ten times as long as two workers of a single thread.
    """
    here = sum(node.local_world_size for node in world.nodes if node.addr == member.addr)
    if here == member.local_world_size or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // here))}


def worker_forks(
    spec: LaunchSpec, world: World, member: Member, host: HostFolder, since: int = 0
) -> tuple[dict[int, ForkRequest], Any]:
    """Return the workers of a generation on this node, and where their output goes.

    Returns:
        The workers by local rank, and torch's `LogsDest`.
    """
    environs = {rank: worker_environment(spec, world, member, rank) for rank in range(spec.workers)}
    logs = spec.logs.reify(environs)
    result = {}
    for local_rank, environ in environs.items():
        environ["EDL_BOARD"] = str(host.status_page(local_rank))
        environ["EDL_SLOTS"] = host.slots(local_rank)
        environ["EDL_REPLICAS"] = str(host.replicas)
        environ["EDL_RUN"] = host.run
        environ["EDL_SINCE_GENERATION"] = str(since)
        if spec.checkpoint:
            environ["EDL_CHECKPOINT"] = spec.checkpoint
            environ["EDL_CHECKPOINT_INTERVAL_S"] = str(spec.checkpoint_interval_s)
        environ["EDL_STDOUT"] = logs.stdouts.get(local_rank, "")
        environ["EDL_STDERR"] = logs.stderrs.get(local_rank, "")
        environ["TORCHELASTIC_ERROR_FILE"] = logs.error_files[local_rank]
        result[local_rank] = ForkRequest(
            environ,
            stacks=str(host.stacks(local_rank)),
        )
    return result, logs


def error_files(logs: Any) -> dict[int, Path]:
    """Return the files in which workers leave their exceptions, by local rank; `logs` is torch's `LogsDest`."""
    return {rank: Path(path) for rank, path in logs.error_files.items()}
