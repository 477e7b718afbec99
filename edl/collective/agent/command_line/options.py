"""The options of `edl run`: torchrun's, parsed by its own parser, and EDL's."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from torch.distributed import run as torchrun

from edl.collective.agent.command_line.slurm import SlurmStep
from edl.collective.removed import REMEDIES, describe_removal
from edl.errors import SettingsError
from edl.settings import read

__all__ = ["parse_options", "parser"]

_DESCRIPTION = """\
Start a training job, or join one: `torchrun`, elastic. Scripts that run under torchrun run
here unchanged. Nodes may come and go between --nnodes MIN:MAX; with `edl.collective.State`
and `Checkpointer` a script goes on where it was.

  edl run --nproc-per-node 2 train.py                          one node, two workers
  edl run --nnodes 1:4 --rdzv-id resnet train.py               start it; the same command in
                                                               another terminal adds a node
  edl run --nnodes 1:4 --rdzv-endpoint node0:29400 train.py    on several hosts: the agent on
                                                               node0 serves the store
  edl run --nnodes 1:4 --rdzv-id resnet \\
      --store consul://10.0.0.9:8500 --checkpoint s3://bucket/resnet train.py

In a task of Slurm's `srun`, --nnodes, --nproc-per-node, --rdzv-id and --rdzv-endpoint
follow from the step (docs/slurm.md).

Exit codes: 0 the job has ended, 1 the script failed, 2 wrong usage, 69 this node or a
GPU of it is faulty, 74 the script's last state could not be stored, 75 too few nodes came in time, or the store
cannot be reached: try again, 137 too little memory (--leave-on-oom), 143 this node was asked to leave (SIGTERM)
and did.
EDL_TERMINATION_LOG names a file that shall say what ended the node, in JSON of at most 4096 bytes."""


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: wanted is a number above 0")
    return value


_OPTIONS: dict[str, dict[str, Any]] = {
    "--store": {
        "metavar": "URL",
        "help": "where the nodes meet: sqlite:///path on one machine, edl://host:29400, consul://host:8500 or "
        "etcd://host:2379 "
        "(default: at --rdzv-endpoint HOST:PORT, where the agent on HOST serves the store; else EDL_DISCOVERY, else a "
        "SQLite file of this user)",
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
        "show their stacks and are started anew; those that visibly work have ten times as long, and those that say "
        "they are busy (Checkpointer.evaluate, busy) as long as they say (default: 300)",
    },
    "--grace-period": {
        "metavar": "SECONDS",
        "type": _seconds,
        "default": 30.0,
        "help": "a node that is asked to leave passes the signal on to its workers, once they have saved where they "
        "save at all, and kills those that have not ended after this long (default: 30, as torchrun)",
    },
    "--leave-on-oom": {
        "action": "store_true",
        "help": "when the kernel killed a worker of this node for want of memory (its cgroup counts that), leave with "
        "exit code 137, for a start with more memory, instead of starting the workers again; the other nodes go on",
    },
    "--log-format": {
        "choices": ["text", "json"],
        "default": "text",
        "help": "how the agent's own lines are written to standard error: for people, or an object a line for log "
        "collectors, with the time, the level, the logger and what the line names (default: text)",
    },
    "--readmit": {
        "action": "store_true",
        "help": "join although the job leaves this host out since a GPU of it failed: it was reset or replaced",
    },
    "--node-check": {
        "action": "store_true",
        "help": "before joining, compute on all GPUs, copy among them and reduce with other waiting nodes, in pairs "
        "and twice, so that a faulty one is found, and ends with exit code 69",
    },
    "--node-check-timeout": {
        "metavar": "SECONDS",
        "type": _seconds,
        "default": 60.0,
        "help": "for each of the two rounds of the node check (default: 60)",
    },
    "--tls-ca": {
        "metavar": "FILE",
        "help": "with --tls-cert and --tls-key: agents speak mutual TLS among one another, and believe certificates "
        "of these CAs (docs/security.md; default: EDL_TLS_CA)",
    },
    "--tls-cert": {"metavar": "FILE", "help": "this agent's certificate, PEM (default: EDL_TLS_CERT)"},
    "--tls-key": {"metavar": "FILE", "help": "its private key, PEM, readable by owner and group only (EDL_TLS_KEY)"},
    "--tls-server-name": {
        "metavar": "NAME",
        "help": "the name that the other agents' certificates must hold (default: EDL_TLS_SERVER_NAME, else each "
        "one's --local-addr)",
    },
    "--framework": {
        "choices": ["torch", "paddle"],
        "default": "torch",
        "help": "what the script trains with; with paddle, workers find the variables that paddle.distributed.launch "
        "sets (default: torch)",
    },
    "--preload": {
        "metavar": "MODULE[,MODULE]",
        "default": "",
        "help": "modules that are imported once, before workers are forked from that process, besides torch and the "
        "packages that the script imports first. Name only modules that do the same in each worker: what one draws "
        "at random when it is imported is the same on all ranks",
    },
    "--no-prewarm": {
        "action": "store_true",
        "help": "import nothing ahead of time, neither what the script imports nor what --preload names",
    },
}


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line instead of after a page of usage."""

    def error(self, message: str) -> NoReturn:
        if "training_script" in message:
            message = "which script? `edl run [OPTIONS] train.py [ITS ARGUMENTS]`"
        raise SettingsError(f"{message}{self._meant(message)}; `{self.prog} --help` lists the options")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = list(args or ())
        return super().parse_args(args, namespace)

    def _meant(self, message: str) -> str:
        known = [name for action in self._actions for name in action.option_strings]
        known += [name.replace("_", "-") for name in known if name.startswith("--")]
        unknown = message.partition("unrecognized arguments: ")[2].split()
        for word in unknown or self._given:
            if not word.startswith("-"):
                break  # the script, or an option's value: what follows may not be an option of ours
            name = word.partition("=")[0]
            if name in REMEDIES:
                return f"; {describe_removal(name)}"
            near = difflib.get_close_matches(name.replace("_", "-"), known, n=1, cutoff=0.7)
            if name not in known and near:
                return f"; did you mean {near[0]} instead of {name}?"
        return ""


class _JoinedConfig(argparse.Action):
    """Merges NAME=VALUE pairs of repeated `--rdzv-conf` options; for the same name, the later one wins."""

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


def parser() -> argparse.ArgumentParser:
    """Return a parser of torchrun's options and EDL's."""
    options = torchrun.get_args_parser()
    options.__class__ = _Parser  # torchrun makes the parser itself
    options.prog = "edl run"
    options.description = _DESCRIPTION
    options.allow_abbrev = False  # abbreviations would also be searched for among the script's arguments
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    for action in options._actions:
        if action.dest == "rdzv_conf":
            action.__class__ = _JoinedConfig  # the operator adds its own pairs, and a user's must not be lost
    options.usage = "edl run [OPTIONS] train.py [ARGUMENTS OF train.py]"
    options._optionals.title = "torchrun's options"
    ours = options.add_argument_group("EDL's options")
    options._action_groups.insert(0, options._action_groups.pop())  # first in the help, since no other page has them
    for name, kwargs in _OPTIONS.items():
        ours.add_argument(name, **kwargs)
    return options


_FROM_SLURM = ("nnodes", "nproc_per_node", "rdzv_id")


def parse_options(argv: Sequence[str], step: SlurmStep | None) -> argparse.Namespace:
    """Parse a command line. In a task of a Slurm step, options that are not given are derived from the step.

    torchrun's own variables (such as `PET_NNODES`) count as given.

    Args:
        argv: The command line.
        step: The Slurm step; None outside of Slurm.

    Raises:
        SettingsError: An option is unknown or wrong, or the step's GPUs do not determine how many workers to run.
    """
    options = parser()
    if step is None:
        return options.parse_args(list(argv))
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
    if step.hosts > 1 and step.first_host and not _names_store(parsed, options.get_default("master_addr")):
        parsed.rdzv_endpoint = f"{step.first_host}:{step.rendezvous_port}"
        if "is_host=" not in parsed.rdzv_conf:
            parsed.rdzv_conf = ",".join(filter(None, (parsed.rdzv_conf, f"is_host={int(step.is_first_host)}")))
    return parsed


def _names_store(options: argparse.Namespace, usual_address: str) -> bool:
    """Return whether an option or the environment says where nodes meet."""
    named = options.store or options.rdzv_endpoint or options.standalone or read("EDL_DISCOVERY", str)
    return bool(named) or options.master_addr != usual_address
