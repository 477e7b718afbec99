"""The command line `edl NAME`.

`main` finds the command, runs it, and turns errors into one line and an exit code: 1 for an `EDLError`, 2 for wrong
usage, 75 if the store or Kubernetes does not respond (EX_TEMPFAIL: try again), 130 after Ctrl-C.

Commands come from a table in this module, and from entry points in the group `edl.commands` of any installed package.
Each command is imported only when it runs: some commands need torch, and `edl --help` should not import it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

import edl
from edl.errors import DiscoveryError, EDLError, KubernetesError, SettingsError
from edl.init_process import run_init
from edl.quoting import did_you_mean
from edl.settings import read

__all__ = ["main"]

_INTRODUCTION = """\
EDL turns idle GPUs into soft labels. Teachers serve a model and register
themselves. Students find the teachers that are live and pull soft labels from
them while they train. Teachers may join, leave or die at any moment: every
sample still gets its label, once and in order."""

_FIRST_STEPS = """\
First steps (discovery is a SQLite file on this machine: no server to install):
  edl demo
      a two-minute tour, on handwritten digits
  edl serve --callable mymodel.py:predict --input "image:fp32[1,8,8]" --service digits
      a teacher: any Python function over numpy arrays; start as many as you like
  edl teachers --watch
      shows which teachers are live, and every change

Then, in the student's program:
  from edl.distill.torch import distill
  for (images, labels), soft in distill(loader, teachers="digits",
                                        inputs=["image", None], outputs=["logits"]):
      ...

Elastic students:
  edl run --nnodes 1:4 --nproc-per-node 2 --rdzv-id my-job train.py
      torchrun's options; workers and nodes may come, go or die; training continues
  edl status my-job
      shows the members of the job, and where its time goes

Across machines, give every command and program the same store:
  edl store --file store.sqlite
      serves one; not needed with Consul or etcd
  --store edl://HOST:29400 (or consul://HOST:8500), or EDL_DISCOVERY in the environment"""

_USAGE = "usage: edl [--version] [--help] COMMAND [ARGUMENT ...]"

EXIT_FAILED, EXIT_USAGE, EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, EXIT_TRY_AGAIN = 1, 2, 141, 130, 75
"""Exit codes. After SIGPIPE and SIGINT, as in a shell, they are 128 plus the signal's number. EXIT_TRY_AGAIN is
EX_TEMPFAIL from sysexits.h, and EXIT_USAGE is argparse's exit code."""

_GROUP = "edl.commands"
_COMMANDS = {
    "demo": ("edl.cli.demo", "Trains students while teachers come, go and die"),
    "serve": ("", "Serves a model to students as a teacher"),
    "register": ("", "Registers a running Triton, vLLM or other KServe v2 server"),
    "proxy": ("edl.cli.servers:proxy", "Puts teachers behind one vLLM URL, for trainers that accept only one"),
    "teachers": ("edl.cli.teachers", "Lists live teachers, once or as the list changes"),
    "store": ("edl.cli.servers:store", "Serves a store for teachers and jobs on other hosts"),
    "label": ("edl.cli.label", "Stores soft labels for a whole data set, ahead of time"),
    "master": ("edl.cli.master", "Hands out a job's data to its workers in shards, without losing any"),
    "train": ("edl.cli.train", "Trains a model from a model definition and a Parquet file, in one command"),
    "run": ("edl.collective.agent.command_line.cli", "Starts or joins an elastic job, with torchrun's options"),
    "status": ("edl.cli.status", "Shows a job's members, progress and lost time; on Kubernetes also why it waits"),
    "report": ("edl.cli.report", "Draws a chart of a job: what its nodes did and when, its progress and its goodput"),
    "dashboard": ("edl.cli.servers:dashboard", "Serves a web page with all jobs, teachers and shards in a store"),
    "submit": ("edl.cli.kube.submit", "Starts an elastic job on Kubernetes, optionally with teachers"),
    "jobs": ("edl.cli.kube.workloads:jobs", "Lists jobs and pools in a Kubernetes cluster"),
    "logs": ("edl.cli.kube.logs", "Shows the logs of a job's or pool's members on Kubernetes"),
    "scale": ("edl.cli.kube.workloads:scale", "Sets the number of workers or teachers, or lets EDL decide (`auto`)"),
    "suspend": ("edl.cli.kube.workloads:suspend", "Stops the pods of jobs and pools; `edl resume` restarts them"),
    "resume": ("edl.cli.kube.workloads:resume", "Restarts the pods of suspended jobs and pools"),
    "delete": ("edl.cli.kube.workloads:delete", "Deletes jobs and pools on Kubernetes without asking"),
    "operator": ("edl.cli.servers:operator", "Runs ElasticJobs and TeacherPools in a Kubernetes cluster"),
}
"""Target and summary of each command, in the order in which a new user needs the commands. If the target is empty, an
entry point names it."""

_PROVIDERS = {
    "aiohttp": ("aiohttp", "dashboard"),
    "fsspec": ("fsspec", "collective"),
    "grpc_health": ("grpcio-health-checking", "serving"),
    "kubernetes": ("kubernetes", "kubernetes"),
    "matplotlib": ("matplotlib", "demo"),
    "paddle": ("paddlepaddle", "paddle"),
    "sklearn": ("scikit-learn", "demo"),
    "tomli": ("tomli", "serving"),
    "torch": ("torch", "torch"),
    "yaml": ("pyyaml", "kubernetes"),
}
"""For each module, the package that contains it, and the EDL extra that installs the package and everything needed with
it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `edl`.

    Args:
        argv: Arguments without the program's name; None for this process's arguments.

    Returns:
        The exit code. `argparse` may raise SystemExit instead, after `--help`.
    """
    if argv is None and (code := run_init()) is not None:
        return code
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()  # here rather than at exit, where a broken pipe could not be caught
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has exited (`edl teachers | head`). Discard the rest of the buffer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (EDLError, ModuleNotFoundError) as exc:
        message = str(exc) if isinstance(exc, EDLError) else explain_missing(exc)
        if message is None or read("EDL_TRACEBACK", str) is not None:
            raise
        print(f"edl {arguments[0]}: {message or type(exc).__name__}", file=sys.stderr)
        if isinstance(exc, (DiscoveryError, KubernetesError)):
            return EXIT_TRY_AGAIN
        return EXIT_USAGE if isinstance(exc, SettingsError) else EXIT_FAILED
    return code


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0 if arguments else EXIT_USAGE
    if arguments[0] in ("-V", "--version"):
        print(f"edl {edl.__version__}")
        return 0
    name = arguments[0]
    commands = find_commands()
    if name not in commands:
        hint = did_you_mean(name, commands) or f"; the commands are {', '.join(commands)}."
        print(f"edl: unknown command {name!r}{hint} `edl --help` explains.", file=sys.stderr)
        return EXIT_USAGE
    return commands[name].load()(arguments[1:]) or 0


def _help() -> str:
    commands = find_commands()
    width = max(len(name) for name in commands)
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in commands.items()]
    listing = "\n".join(["Commands:", *lines])
    ending = "`edl COMMAND --help` explains a command. EDL_TRACEBACK=1 shows where an error came from."
    return "\n\n".join([_USAGE, _INTRODUCTION, listing, _FIRST_STEPS, ending])


@dataclass(frozen=True)
class Command:
    """A command; `target` is `package.module`, followed by `:function` unless the function is `main`."""

    name: str
    target: str
    summary: str

    def load(self) -> Callable[[Sequence[str]], int | None]:
        """Import the command's function."""
        module, _, function = self.target.partition(":")
        found = getattr(importlib.import_module(module), function or "main", None)
        if not callable(found):
            raise SettingsError(f"the package that offers this command has no function {self.target}")
        command: Callable[[Sequence[str]], int | None] = found
        return command


def find_commands() -> dict[str, Command]:
    """Return all commands by name, in the order in which to list them. EDL's own commands cannot be replaced."""
    offered = {entry.name: entry.value for entry in entry_points(group=_GROUP)}
    found = {}
    for name in [*_COMMANDS, *sorted(offered.keys() - _COMMANDS.keys())]:
        target, summary = _COMMANDS.get(name, ("", f"({offered.get(name)})"))
        if target or name in offered:
            found[name] = Command(name, target or offered[name], summary)
    return found


def explain_missing(exc: ModuleNotFoundError) -> str | None:
    """Return what to install for a missing module; None for a module of EDL, which is a bug: show its traceback."""
    missing = (exc.name or "").partition(".")[0]
    if missing in ("", "edl", "edl_serving"):
        return None
    if missing not in _PROVIDERS:
        return f"the Python package {missing!r} is not installed: install it"
    package, extra = _PROVIDERS[missing]
    return f"the Python package {missing!r} is not installed: pip install {package}, or EDL with its extra [{extra}]"
