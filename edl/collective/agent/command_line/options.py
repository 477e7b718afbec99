"""The options of `edl run`: torchrun's options, parsed by torchrun's own parser, and EDL's options."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from torch.distributed import run as torchrun

from edl.collective.agent.command_line.slurm import SlurmStep
from edl.collective.removed import REMEDIES, describe_removal
from edl.command_line import CommandParser, credential_options, duration
from edl.settings import read

_DESCRIPTION = """\
Starts or joins a training job: an elastic `torchrun`. Scripts that run under torchrun run here unchanged. Nodes may
come and go within --nnodes MIN:MAX; a script with `edl.collective.State` and `Checkpointer` resumes its work.

In a Slurm `srun` task, --nnodes, --nproc-per-node, --rdzv-id and --rdzv-endpoint come from the step (docs/slurm.md)."""

_EXAMPLES = """\
examples:
  edl run --nproc-per-node 2 train.py                          one node, two workers
  edl run --nnodes 1:4 --rdzv-id resnet train.py               start it; the same command in
                                                               another terminal adds a node
  edl run --nnodes 1:4 --rdzv-endpoint node0:29400 train.py    on several hosts: the agent on
                                                               node0 serves the store
  edl run --nnodes 1:4 --rdzv-id resnet \\
      --store consul://10.0.0.9:8500 --checkpoint s3://bucket/resnet train.py"""

_DETAILS = """\
Exit codes: 0 the job has ended; 1 the script failed; 2 wrong usage; 69 this node or one of its GPUs is faulty;
74 the script's last state could not be stored; 75 too few nodes joined in time, no teacher was live, or the
store cannot be reached (try again); 137 too little memory (--leave-on-oom); 143 this node left because it was
asked to (SIGTERM).
The reason why the node ended is written to the file that EDL_TERMINATION_LOG names (JSON, at most 4096 bytes)."""

_USUAL = {
    "nnodes": ("MIN:MAX", "number of nodes, or its bounds (default: 1)"),
    "nproc_per_node": ("N", "workers on each node: a number, gpu, cpu or auto (default: 1)"),
    "rdzv_id": ("NAME", "name of the job, the same on each node"),
    "rdzv_endpoint": ("HOST:PORT", "where nodes meet: the agent on HOST serves the store"),
    "max_restarts": ("N", "restarts of the workers before the job fails"),
    "module": (None, "the script is a module, as for `python -m`"),
}
"""Options of torchrun that `--help` shows, with shorter descriptions."""


def _add_options(parser: CommandParser) -> None:
    add = parser.add_argument_group("EDL's options").add_argument
    store = (
        "where the nodes meet: sqlite:///path on one machine, edl://host:29400, consul://host:8500 or "
        "etcd://host:2379 (default: --rdzv-endpoint; else EDL_DISCOVERY, else this user's SQLite file)"
    )
    add("--store", "--discovery", dest="store", metavar="URL", help=store)
    checkpoint = (
        "where checkpoints are stored: a folder, s3://..., any fsspec URL (default: EDL_CHECKPOINT, else in memory)"
    )
    add("--checkpoint", metavar="URL", help=checkpoint)
    interval = "time between two stored checkpoints (default: 5m)"
    add("--checkpoint-interval", metavar="TIME", type=duration(), default=300.0, help=interval)
    add = parser.add_advanced_group("EDL's other options").add_argument
    add(
        "--node-check",
        action="store_true",
        help="before joining, test all GPUs, copies between them, and reductions in pairs with other waiting "
        "nodes, in two rounds; a faulty node exits with code 69",
    )
    readmit = "rejoin a job that excluded this host because of a failed GPU that has since been reset or replaced"
    add("--readmit", action="store_true", help=readmit)
    lease = "the other nodes continue without a node that is silent for this long (default: 1.5s)"
    add("--lease-ttl", metavar="TIME", type=duration(), default=1.5, help=lease)
    add(
        "--hang-after",
        metavar="TIME",
        type=duration(),
        default=300.0,
        help="workers that stop reporting steps for this long or 20 typical steps, whichever is longer, print their "
        "stacks and are restarted. Workers that are visibly working get ten times as long, and workers that declare "
        "themselves busy (Checkpointer.evaluate, busy) get as long as they declare (default: 5m)",
    )
    grace = (
        "a node that is asked to leave passes the signal on to its workers once they have saved (if they save at all), "
        "and kills workers that are still running after this long (default: 30s, like torchrun)"
    )
    add("--grace-period", metavar="TIME", type=duration(), default=30.0, help=grace)
    add(
        "--leave-on-oom",
        action="store_true",
        help="if the kernel kills a worker on this node for lack of memory (counted by the cgroup), exit with code "
        "137 instead of restarting the workers, so that the node can be restarted with more memory; the other nodes "
        "continue",
    )
    rounds = "time for each of the two rounds of the node check (default: 60s)"
    add("--node-check-timeout", metavar="TIME", type=duration(), default=60.0, help=rounds)
    framework = (
        "framework that the script trains with; with paddle, workers get the variables that paddle.distributed.launch "
        "sets (default: torch)"
    )
    add("--framework", choices=["torch", "paddle"], default="torch", help=framework)
    add(
        "--preload",
        metavar="MODULE[,MODULE]",
        default="",
        help="modules to import once, before workers are forked, in addition to torch and the packages that the script "
        "imports first. Name only modules that behave the same in each worker: random values drawn at import are the "
        "same on all ranks",
    )
    prewarm = "import nothing ahead of time, neither what the script imports nor what --preload names"
    add("--no-prewarm", action="store_true", help=prewarm)
    add("--log-format", choices=["text", "json"], default="text", help="format on standard error (default: text)")
    title = "mutual TLS among the agents (docs/security.md); files are reread on change"
    add = parser.add_advanced_group(title).add_argument
    for name, words in credential_options("client", "agents").items():
        if name.startswith("tls-"):
            add(f"--{name}", metavar="NAME" if name.endswith("name") else "FILE", help=words)


class _RunParser(CommandParser):
    """Reports a missing script. For an option that EDL no longer has, says what replaces the option."""

    def error(self, message: str) -> NoReturn:
        if "training_script" in message:
            message = "which script? `edl run [OPTIONS] train.py [ITS ARGUMENTS]`"
        super().error(message)

    def _hint(self, name: str) -> str:
        return f"; {describe_removal(name)}" if name in REMEDIES else super()._hint(name.replace("_", "-"))


class _JoinedConfig(argparse.Action):
    """Merges the pairs of repeated `--rdzv-conf` options; if a name occurs twice, the later value wins."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        given = before is not self.default  # the default comes from the environment, and options replace it
        setattr(namespace, self.dest, ",".join(filter(None, (before, values))) if given else values)


def parser() -> CommandParser:
    options = _RunParser("edl run", _DESCRIPTION, _EXAMPLES, _DETAILS)
    options.usage = "edl run [OPTIONS] train.py [ARGUMENTS OF train.py]"
    _add_options(options)
    usual = options.add_argument_group("torchrun's options")
    others = options.add_advanced_group("torchrun's other options")
    for action in torchrun.get_args_parser()._actions:
        if action.dest == "rdzv_conf":
            action.__class__ = _JoinedConfig  # the operator adds its own pairs, and a user's must not be lost
        if action.dest in _USUAL:
            action.metavar, action.help = _USUAL[action.dest]
        if not action.option_strings:
            action.help = argparse.SUPPRESS  # the usage says it
            options._add_action(action)
        elif action.dest != "help":
            (usual if action.dest in _USUAL else others)._add_action(action)
    return options


_FROM_SLURM = ("nnodes", "nproc_per_node", "rdzv_id")


def parse_options(argv: Sequence[str], step: SlurmStep | None) -> argparse.Namespace:
    """Parse a command line. A Slurm step sets what no option or torchrun variable (such as `PET_NNODES`) sets."""
    options = parser()
    parsed: argparse.Namespace
    if step is None:
        parsed = options.parse_args(list(argv))
        return parsed
    usual = {name: options.get_default(name) for name in _FROM_SLURM if f"PET_{name.upper()}" not in os.environ}
    options.set_defaults(**dict.fromkeys(usual))
    parsed = options.parse_args(list(argv))
    unsaid = {name for name in usual if getattr(parsed, name) is None}
    if "nproc_per_node" in unsaid:
        parsed.nproc_per_node = str(step.workers)
    elif parsed.nproc_per_node == "cpu":
        parsed.nproc_per_node = str(step.cpus)  # torch counts the host's CPUs, which other jobs use too
    for name, value in (("nnodes", str(step.tasks)), ("rdzv_id", step.name)):
        if name in unsaid:
            setattr(parsed, name, usual[name] if parsed.standalone else value)
    named = parsed.store or parsed.rdzv_endpoint or parsed.standalone or read("EDL_DISCOVERY", str)
    named = named or parsed.master_addr != options.get_default("master_addr")
    if step.hosts > 1 and step.first_host and not named:
        parsed.rdzv_endpoint = f"{step.first_host}:{step.rendezvous_port}"
        if "is_host=" not in parsed.rdzv_conf:
            parsed.rdzv_conf = ",".join(filter(None, (parsed.rdzv_conf, f"is_host={int(step.is_first_host)}")))
    return parsed
