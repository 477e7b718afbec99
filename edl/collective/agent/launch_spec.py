"""The specification of a node's agent, and the environment of its workers: torchrun's variables and EDL's own.

Paddle's trainers all meet at a store that the first of them opens, at `PADDLE_MASTER`, and each trainer has its own
address by which parts of Paddle identify it. So a node reserves consecutive ports, one for the store and one for every
trainer; `Node.port` is the first. This module imports torch, but not Paddle.
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


_TRIES = 100  # most tries find a row of free ports; on a host without any, this still ends within a second


def paddle_environment(world: World, member: Member, local_rank: int, *, gpu: bool = False) -> dict[str, str]:
    """Return what `paddle.distributed.launch` sets for a trainer of collective training.

    With `gpu`, Paddle uses GPUs, one per trainer; otherwise trainers communicate through gloo.
    """
    rank = member.first_rank + local_rank
    endpoints = [
        f"{node.addr}:{node.port + 1 + place}" for node in world.nodes for place in range(node.local_world_size)
    ]
    first = world.nodes[0]
    return {
        "PADDLE_MASTER": f"{first.addr}:{first.port}",
        "MASTER_ADDR": first.addr,  # Paddle reads it first
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
    """Return whether the installed Paddle is built for GPUs. Such a build must not be imported before a fork."""
    try:
        metadata.distribution("paddlepaddle-gpu")
    except metadata.PackageNotFoundError:
        return False
    return True


class ReservedPorts:
    """Consecutive ports that the kernel gives to no other process, until `close`.

    They are bound but not listened on, and all sides set `SO_REUSEADDR`. So Paddle's trainers can still bind and
    listen, while the kernel does not hand them to a process that asks for any free port.

    Attributes:
        port: The first port.

    Raises:
        EDLError: No row of that many free ports was found.
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
        """Release the ports."""
        for reserved in self._sockets:
            reserved.close()


def _row(count: int) -> list[socket.socket]:
    """Return sockets bound to consecutive ports; none if a port in the row is taken."""
    row: list[socket.socket] = []
    while len(row) < count:
        bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            bound.bind(("", row[0].getsockname()[1] + len(row) if row else 0))
            # Set only now, so that no port reserved by another process is taken; from now on a trainer can share it.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except (OSError, OverflowError):
            for reserved in (*row, bound):
                reserved.close()
            return []
        row.append(bound)
    return row


# --- The specification and the environment ---


class MasterEndpoint(Protocol):
    """Where the ranks of a generation meet: torch's MASTER_PORT, held open as long as the object lives."""

    @property
    def port(self) -> int:
        """The port, for the other nodes."""
        ...


@dataclass(frozen=True)
class LaunchSpec:
    """One node's part of a job.

    Attributes:
        job: The name that all nodes share (torchrun's `--rdzv-id`).
        store: URL of the store in which the job has its name.
        program: What the workers run.
        workers: Number of workers on this node.
        rendezvous: How a world is formed.
        addr: Address at which other nodes' workers reach this node.
        ttl_s: Seconds without a sign of life after which the others continue without this node.
        join_timeout_s: Seconds to wait for enough nodes.
        grace_s: Seconds that workers may take to end after the signal that asked this node to leave, before SIGKILL.
        max_restarts: How many errors of the script itself, on any node, the job survives.
        checkpoint: fsspec URL of the storage, empty for none.
        checkpoint_interval_s: Seconds between stored checkpoints.
        hang: How long workers may go without a step before they are restarted.
        readmit: Whether to join although the job excludes this host because one of its GPUs failed.
        check: How to test the node before it joins; None to skip that.
        logs: Where the workers' output goes: a `torch.distributed.elastic.multiprocessing.LogsSpecs`.
        environ: Variables added to the workers' environment.
        tls: TLS for connections between agents; None for plain TCP.
        resumable: Whether the job has a name under which it can be started again; only then is its state kept in
            memory. Without a name no other node can join, so this one continues however long the store does not answer.
        command: Digest of the script and its arguments if the job has no name, to recognize states in memory that
            another command left; empty if the name identifies the job.
        framework: What the workers train with, `torch` or `paddle`.
        role: torchrun's `--role`, with which the lines of `--tee` begin.
        slurm: Whether this node is a task of a Slurm step, so that signals come from Slurm.
        leave_on_oom: Whether this node leaves the job, for a start with more memory, when the kernel killed one of its
            workers for lack of memory, instead of restarting its workers.
        termination_log: File for the message that says why this node ended; empty for none.
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
    """Open a meeting place for the ranks of a single generation.

    An earlier generation's addresses must not be found there.

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
    """Divide a host's cores among the workers of several nodes on it, unless the user set OMP_NUM_THREADS.

    Otherwise each worker would start as many threads as there are cores, and OpenMP's threads wait by spinning: on two
    cores, two workers with two threads each take ten times as long as with a single thread each.
    """
    here = sum(node.local_world_size for node in world.nodes if node.addr == member.addr)
    if here == member.local_world_size or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // here))}


def worker_forks(
    spec: LaunchSpec, world: World, member: Member, host: HostFolder, since: int = 0
) -> tuple[dict[int, ForkRequest], Any]:
    """Return the workers of a generation on this node, and torch's `LogsDest` for their output."""
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
    """Return the files to which workers write their exceptions, by local rank; `logs` is torch's `LogsDest`."""
    return {rank: Path(path) for rank, path in logs.error_files.items()}
