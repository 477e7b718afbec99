"""The ways to start an elastic job that are compared: `edl run`, torchrun, torchft and Ray Train."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks._child import ROOT
from benchmarks._elastic_job import Job, Launch
from benchmarks._elastic_network import Network
from benchmarks._elastic_task import Task

__all__ = [
    "RAY",
    "TORCHFT",
    "edl_hosts",
    "edl_nodes",
    "edl_script",
    "edl_workers",
    "job_name",
    "ray_workers",
    "store_url",
    "torchft",
    "torchrun_nodes",
    "torchrun_nodes_in_store",
    "torchrun_workers",
]

RAY = ROOT / ".tools/ray/bin/python"
TORCHFT = ROOT / ".tools/torchft/bin/python"
_EDL = (sys.executable, "-m", "edl", "run")
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""By default, torchrun does not recover from a worker's death: the ranks of the next world find old addresses."""


_INTERFACE = "GLOO_SOCKET_IFNAME"


def _script(name: str, task: Task, node: int) -> list[str]:
    return [str(ROOT / "benchmarks" / name), *replace(task, name=str(node)).arguments()]


def edl_workers(task: Task, workers: int) -> Job:
    """Return a job with one `edl run` node that has `workers` ranks."""
    return _edl(task, ["--nnodes", "1", "--nproc-per-node", str(workers)], workers)


def edl_nodes(task: Task, most: int) -> Job:
    """Return a job with up to `most` `edl run` nodes, with one rank each, which meet in a SQLite file."""
    return _edl(task, ["--nnodes", f"1:{most}", "--nproc-per-node", "1"], 1)


def edl_script(folder: Path, most: int, script: str, arguments: Sequence[str]) -> Job:
    """Return a job like `edl_nodes` that runs another script, which gets its node as `--name NUMBER`."""
    command = [str(ROOT / "benchmarks" / script), *arguments]
    options = ["--nnodes", f"1:{most}", "--nproc-per-node", "1"]
    return _edl(Task(folder, "0", 0, 0.0), options, 1, lambda node: [*command, "--name", str(node)])


def edl_hosts(task: Task, network: Network, store: str) -> Job:
    """Return a job of `edl run` nodes, with one rank each, on a network's hosts, which meet in a store."""
    options = ["--nnodes", f"1:{network.hosts}", "--nproc-per-node", "1"]
    return _edl(task, options, 1, store=store, network=network)


def job_name(task: Task) -> str:
    """Return the name of an `edl run` job in its store."""
    return f"bench-{task.folder.name}"


def store_url(task: Task) -> str:
    """Return the URL of the store in which the nodes of an `edl run` job meet."""
    return f"sqlite:///{task.folder}/store.sqlite"


def _edl(
    task: Task,
    options: list[str],
    workers: int,
    script: Callable[[int], list[str]] | None = None,
    store: str | None = None,
    network: Network | None = None,
) -> Job:
    name, store = job_name(task), store or store_url(task)
    command = [*_EDL, *options, "--rdzv-id", name, "--store", store]
    digest = hashlib.sha256(f"{store} {name}".encode()).hexdigest()[:16]
    memory = Path(f"/dev/shm/edl-{os.getuid()}") / digest
    script = script or partial(_script, "_elastic_edl.py", task)

    def launch(node: int) -> Launch:
        whole = [*command, *script(node)]
        return Launch(whole) if network is None else Launch(network.command(node, whole), {_INTERFACE: "eth0"})

    return Job(task.folder, launch, workers, memory)


def torchrun_workers(task: Task, workers: int) -> Job:
    """Return a job with one torchrun node that has `workers` ranks."""
    options = ["--standalone", "--nproc-per-node", str(workers), "--max-restarts", "1000"]
    command = [*_TORCHRUN, *options]
    return Job(
        task.folder, lambda node: Launch([*command, *_script("_elastic_torchrun.py", task, node)], _OWN_STORE), workers
    )


def torchrun_nodes(task: Task, most: int) -> Job:
    """Return a job with up to `most` torchrun nodes, with one rank each. The first node hosts the rendezvous."""
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{_free_port()}"]
    return _torchrun_nodes(task, most, [*meet, "--rdzv-conf", "last_call_timeout=2"])


def torchrun_nodes_in_store(task: Task, most: int) -> Job:
    """Return a job like `torchrun_nodes`, but this process hosts the rendezvous, so any node may die.

    Nodes notice a death in 4 s instead of 15 s.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{store.port}"]
    timing = "is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=4"
    return _torchrun_nodes(task, most, [*meet, "--rdzv-conf", timing], store)


def _torchrun_nodes(task: Task, most: int, meet: list[str], store: TCPStore | None = None) -> Job:
    """Return a job of torchrun agents with these rendezvous options. The job holds this process's store, if any."""
    options = ["--nnodes", f"1:{most}", "--nproc-per-node", "1", "--max-restarts", "1000", "--rdzv-id", "bench", *meet]
    command = [*_TORCHRUN, *options]

    def launch(node: int, store: TCPStore | None = store) -> Launch:
        return Launch([*command, *_script("_elastic_torchrun.py", task, node)], _OWN_STORE)

    return Job(task.folder, launch)


def torchft(task: Task, join_timeout_s: float, stack: ExitStack) -> Job:
    """Return a job of replica groups with one rank each, and start a lighthouse that the `stack` ends.

    Args:
        join_timeout_s: Seconds that the lighthouse waits for replicas that still seem alive (its default is 60).
    """
    port = _free_port()
    options = ["--min_replicas", "1", "--bind", f"127.0.0.1:{port}"]
    options += ["--join_timeout_ms", str(round(join_timeout_s * 1000))]
    lighthouse = subprocess.Popen(
        [str(TORCHFT.with_name("torchft_lighthouse")), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    stack.callback(lighthouse.wait, 10)
    stack.callback(lighthouse.kill)
    environ = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}
    python = str(TORCHFT)
    return Job(task.folder, lambda node: Launch([python, *_script("_elastic_torchft.py", task, node)], environ))


def ray_workers(task: Task, workers: int) -> Job:
    """Return a job with one Ray node that has `workers` Ray Train workers."""
    environ = {"BENCHMARK_WORKERS": str(workers), "RAY_USAGE_STATS_ENABLED": "0"}
    return Job(task.folder, lambda node: Launch([str(RAY), *_script("_elastic_ray.py", task, node)], environ), workers)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
