"""`edl run`: torchrun's command line, for an agent of ours.

The options are parsed by torchrun's own parser, so that a command that works with torchrun means the same here; options
that choose or tune torchrun's rendezvous are accepted and not needed.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

from edl.collective.agent.address import own_address
from edl.collective.agent.agent import Agent
from edl.collective.agent.launch import Launch
from edl.collective.agent.nodecheck_run import CheckSettings
from edl.collective.agent.watch import HangLimits
from edl.collective.agent.world import Rules
from edl.collective.agent.zygote import Warm
from edl.collective.paddle.environment import has_gpu_build
from edl.discovery import open_store
from edl.errors import SettingsError
from edl.settings import default_discovery_url, read

__all__ = ["main", "parser"]

_DESCRIPTION = """\
Start a training job, or join one: `torchrun`, elastic. Scripts that run under torchrun run
here unchanged. Nodes may come and go between --nnodes MIN:MAX; with `edl.collective.State`
and `Checkpointer` a script goes on where it was.

  edl run --nproc-per-node 2 train.py                          one node, two workers
  edl run --nnodes 1:4 --rdzv-id resnet train.py               start it; the same command in
                                                               another terminal adds a node
  edl run --nnodes 1:4 --rdzv-id resnet \\
      --store consul://10.0.0.9:8500 --checkpoint s3://bucket/resnet train.py

Exit codes: 0 the job has ended, 1 the script failed, 2 wrong usage, 69 this node is faulty,
75 too few nodes came in time, 143 this node was asked to leave (SIGTERM) and did."""


_STORE_TIMEOUT_S = 2.0


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: wanted is a number above 0")
    return value


_OPTIONS: dict[str, dict[str, Any]] = {
    "--store": {
        "metavar": "URL",
        "help": "where the nodes meet: sqlite:///path on one machine, or consul://host:8500 "
        "(default: EDL_DISCOVERY, else a SQLite file of this user)",
    },
    "--checkpoint": {
        "metavar": "URL",
        "help": "where checkpoints are stored: a folder, s3://..., any URL of fsspec "
        "(default: EDL_CHECKPOINT, else in memory only)",
    },
    "--checkpoint-interval": {
        "metavar": "SECONDS",
        "type": _seconds,
        "default": 300.0,
        "help": "time between two stored checkpoints (default: 300)",
    },
    "--lease-ttl": {
        "metavar": "SECONDS",
        "type": _seconds,
        "default": 1.5,
        "help": "the others go on without a node that was silent for this long (default: 1.5)",
    },
    "--hang-after": {
        "metavar": "SECONDS",
        "type": _seconds,
        "default": 300.0,
        "help": "workers that report steps, and then none for this long or for 20 usual steps, whichever is longer, "
        "show their stacks and are started anew (default: 300)",
    },
    "--node-check": {
        "action": "store_true",
        "help": "before joining, compute and reduce with other waiting nodes, in pairs and twice, so that a faulty one "
        "is found, and ends with exit code 69",
    },
    "--node-check-timeout": {
        "metavar": "SECONDS",
        "type": _seconds,
        "default": 60.0,
        "help": "for each of the two rounds of the node check (default: 60)",
    },
    "--framework": {
        "choices": ["torch", "paddle"],
        "default": "torch",
        "help": "what the script trains with; with paddle, workers find the variables that paddle.distributed.launch "
        "sets (default: torch)",
    },
    "--no-prewarm": {
        "action": "store_true",
        "help": "do not import torch or Paddle, and what the script imports, before workers are forked",
    },
}


def parser() -> argparse.ArgumentParser:
    """torchrun's options, then ours."""
    options = torchrun.get_args_parser()
    options.prog = "edl run"
    options.description = _DESCRIPTION
    options.allow_abbrev = False  # they would be looked for among the script's arguments, too
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    ours = options.add_argument_group("EDL")
    for name, kwargs in _OPTIONS.items():
        ours.add_argument(name, **kwargs)
    return options


def main(argv: Sequence[str]) -> int:
    """Run an agent with the options `argv`. Returns the exit code.

    Raises:
        SettingsError: an option cannot be used.
        DiscoveryError: the store cannot be reached.
    """
    options = parser().parse_args(list(argv))
    with ExitStack() as stack:
        url = _store_url(options, stack)
        told = _launch(options, url, stack)
        if told.rules.max_nodes > 1 and told.addr.startswith("127.") and not url.startswith("sqlite"):
            _say(f"others will look for this node at {told.addr}; on several hosts give each its --local-addr")
        store = stack.enter_context(open_store(url, timeout_s=_STORE_TIMEOUT_S))
        return Agent(told, store, _say).run()


def _launch(options: argparse.Namespace, url: str, stack: ExitStack) -> Launch:
    minimum, maximum = _nodes(options.nnodes)
    try:
        workers = torchrun.determine_local_world_size(options.nproc_per_node)
    except ValueError as exc:
        raise SettingsError(f"--nproc-per-node {options.nproc_per_node}: {exc}") from exc
    if workers < 1:
        raise SettingsError(f"--nproc-per-node {workers}: at least 1 worker")
    try:
        conf = _parse_rendezvous_config(options.rdzv_conf)
    except ValueError as exc:
        raise SettingsError(f"--rdzv-conf {options.rdzv_conf}: wanted is NAME=VALUE,NAME=VALUE") from exc
    last_call = _number(conf, "last_call_timeout", 1.0 if minimum < maximum else 0.0)
    if workers > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: before torch is imported by the workers
    # A worker that starts touches all of its memory for the first time: with huge pages in a third of the time.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    return Launch(
        job=_job(options, maximum),
        warm=_warm(options),
        workers=workers,
        rules=Rules(minimum, maximum, last_call_s=last_call),
        addr=options.local_addr or own_address(url),
        store=url,
        ttl_s=options.lease_ttl,
        join_timeout_s=_number(conf, "join_timeout", 600.0),
        max_restarts=options.max_restarts,
        checkpoint=options.checkpoint or read("EDL_CHECKPOINT", str) or "",
        checkpoint_interval_s=options.checkpoint_interval,
        role=options.role,
        hang=HangLimits(floor_s=options.hang_after),
        check=CheckSettings(timeout_s=options.node_check_timeout) if options.node_check else None,
        logs=_logs(options, stack),
        framework=options.framework,
        resumable=options.rdzv_id != "none" and not options.standalone,
        environ={"TORCHELASTIC_SIGNALS_TO_HANDLE": options.signals_to_handle},
    )


def _store_url(options: argparse.Namespace, stack: ExitStack) -> str:
    if options.standalone:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="edl-run-"))
        return f"sqlite:///{folder}/store.sqlite"
    return options.store or read("EDL_DISCOVERY", str) or default_discovery_url()


def _job(options: argparse.Namespace, max_nodes: int) -> str:
    """The job's name; a single node needs none, as with torchrun."""
    name = str(options.rdzv_id)
    if name != "none" and not options.standalone:
        if not name or "/" in name or name in (".", ".."):
            raise SettingsError(f"--rdzv-id {name!r}: wanted is a name without slashes")
        return name
    if max_nodes > 1 and not options.standalone:
        raise SettingsError(
            "--rdzv-id NAME is needed where several nodes shall meet: any name, the same on each of them"
        )
    return f"run-{uuid.uuid4().hex[:12]}"


def _warm(options: argparse.Namespace) -> Warm:
    target, arguments = options.training_script, tuple(options.training_script_args)
    # Paddle's build for GPUs asks for them when it is imported, which no fork survives.
    prewarm = not options.no_prewarm and not (options.framework == "paddle" and has_gpu_build())
    if options.no_python and options.module:
        raise SettingsError("--no-python and --module exclude each other")
    if options.no_python and shutil.which(target) is None:
        raise SettingsError(f"there is no program {target!r} on the PATH")
    if options.no_python:
        return Warm("program", target, arguments)
    if options.module:
        return Warm("module", target, arguments, prewarm, options.framework)
    if not Path(target).is_file():
        raise SettingsError(f"there is no script {target!r} in {Path.cwd()}")
    return Warm("script", target, arguments, prewarm, options.framework)


def _logs(options: argparse.Namespace, stack: ExitStack) -> Any:
    folder = options.log_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="edl-logs-"))
    try:
        wanted = options.local_ranks_filter
        ranks = {int(rank) for rank in wanted.split(",")} if wanted else None
        redirects, tee = Std.from_str(options.redirects), Std.from_str(options.tee)
    except ValueError as exc:
        raise SettingsError(f"--redirects, --tee or --local-ranks-filter cannot be used: {exc}") from exc
    return DefaultLogsSpecs(folder, redirects, tee, local_ranks_filter=ranks)


def _nodes(text: str) -> tuple[int, int]:
    try:
        minimum, maximum = torchrun.parse_min_max_nnodes(text)
    except (ValueError, RuntimeError) as exc:
        raise SettingsError(f"--nnodes {text}: wanted are MIN:MAX or one number, such as 1:4 or 2") from exc
    if not 0 < minimum <= maximum:
        raise SettingsError(f"--nnodes {text}: wanted is 0 < MIN <= MAX")
    return minimum, maximum


def _number(conf: dict[str, str], name: str, default: float) -> float:
    try:
        value = float(conf.get(name, default))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise SettingsError(f"--rdzv-conf {name}={conf[name]}: wanted are seconds, such as 30")
    return value


def _say(line: str) -> None:
    print(f"edl run: {line}", file=sys.stderr, flush=True)
