"""The specification of a node's agent, and the endpoint where the ranks of a generation meet.

Paddle's trainers meet at a store that the first trainer opens at `PADDLE_MASTER`. Parts of Paddle identify each trainer
by a further address of its own. So a node reserves consecutive ports, of which `Node.port` is the first.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, TypeAlias

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs

from edl.collective.agent.health.hangs import HangLimits
from edl.collective.agent.health.node_check import NodeCheckSettings
from edl.collective.agent.processes.zygote import ProgramSpec
from edl.collective.agent.rendezvous import RendezvousSettings
from edl.errors import EDLError

if TYPE_CHECKING:
    from edl.protocol.tls import PeerTLS  # imported only if TLS is used

_TRIES = 100  # most tries find consecutive free ports; if none does, the tries end within a second


def has_gpu_build() -> bool:
    """Return whether the installed Paddle is built for GPUs. Such a build must not be imported before a fork."""
    try:
        metadata.distribution("paddlepaddle-gpu")
    except metadata.PackageNotFoundError:
        return False
    return True


class ReservedPorts:
    """Consecutive ports from `port` on, bound with `SO_REUSEADDR` until `close`, so that trainers can listen there."""

    def __init__(self, count: int) -> None:
        for _ in range(_TRIES):
            sockets = _row(count)
            if sockets:
                self._sockets = sockets
                self.port: int = sockets[0].getsockname()[1]
                return
        raise EDLError(f"no {count} consecutive free ports were found in {_TRIES} tries")

    def close(self) -> None:
        for reserved in self._sockets:
            reserved.close()


def _row(count: int) -> list[socket.socket]:
    """Return sockets bound to consecutive ports, or an empty list if one of the ports is taken."""
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


MasterEndpoint: TypeAlias = "TCPStore | ReservedPorts"  # where the ranks of a generation meet, while the object lives


@dataclass(frozen=True)
class LaunchSpec:
    """One node's part of a job."""

    job: str  # the name that all nodes share (torchrun's `--rdzv-id`)
    program: ProgramSpec  # what the workers run
    workers: int  # number of workers on this node
    rendezvous: RendezvousSettings  # how a world is formed
    addr: str  # address at which other nodes' workers reach this node
    store: str = ""  # URL of the store in which the job has its name
    ttl_s: float = 1.5  # seconds without a sign of life after which the other nodes continue without this node
    join_timeout_s: float = 600.0  # seconds to wait for enough nodes
    grace_s: float = 30.0  # seconds that workers may take to end after a signal to leave, before SIGKILL
    max_restarts: int = 0  # how many errors of the script itself, on any node, the job survives
    checkpoint: str = ""  # fsspec URL of the storage, empty for none
    checkpoint_interval_s: float = 300.0  # seconds between stored checkpoints
    role: str = "default"  # torchrun's `--role`, with which the lines of `--tee` begin
    hang: HangLimits = field(default_factory=HangLimits)  # how long workers may go without a step before a restart
    readmit: bool = False  # whether to join although the job excludes this host because one of its GPUs failed
    check: NodeCheckSettings | None = None  # how to test the node before it joins; None to skip that
    logs: Callable[[str], LogsSpecs] = DefaultLogsSpecs  # where output goes, given a folder if the user named none
    environ: Mapping[str, str] = field(default_factory=dict)  # variables added to the workers' environment
    tls: PeerTLS | None = None  # TLS for connections between agents; None for plain TCP
    framework: str = "torch"  # what the workers train with, `torch` or `paddle`
    resumable: bool = True  # whether the job has a name: only then is its state kept, and other nodes can join
    command: str = ""  # digest of what a job without a name runs, to recognize states of another job
    slurm: bool = False  # whether this node is a task of a Slurm step, so that signals come from Slurm
    leave_on_oom: bool = False  # whether to leave after an out-of-memory kill, to be restarted with more memory
    termination_log: str = ""  # file for the message that says why this node ended; empty for none


def open_master_endpoint(spec: LaunchSpec) -> MasterEndpoint:
    """Open an endpoint where the ranks of a single generation meet, without addresses from earlier generations."""
    if spec.framework == "paddle":
        return ReservedPorts(spec.workers + 1)
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
