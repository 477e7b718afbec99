"""The command line: `edl NAME`, a module `cmd_NAME` for every command, with `main(argv)`.

`main` here finds the command, runs it, and turns errors into a line and an exit code: 1 for an `EDLError`, 2 for
wrong usage, 75 where the registry, the store or Kubernetes does not answer (EX_TEMPFAIL: try again), 130 after Ctrl-C.
`_commands` knows which commands there are without importing any of them.

What does not belong here: anything that a program would want to call. Commands parse, call the library, and print.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import edl
from edl.cli import _commands
from edl.errors import DiscoveryError, EDLError, KubernetesError, SettingsError
from edl.init_process import run_init
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
      all of it in about two minutes, on handwritten digits
  edl serve --callable mymodel.py:predict --input "image:fp32[1,8,8]" --service digits
      a teacher: any Python function over numpy arrays; start as many as you like
  edl teachers --watch
      who is live, as it changes

Then, in the student's program:
  from edl.distill.torch import distill
  for (images, labels), soft in distill(loader, teachers="digits",
                                        inputs=["image", None], outputs=["logits"]):
      ...

Students that are elastic themselves:
  edl run --nnodes 1:4 --nproc-per-node 2 --rdzv-id my-job train.py
      torchrun's options; workers and nodes may come, go or die, and training goes on
  edl status my-job
      who takes part, and where the time goes

Across machines, give every command and program the same store:
  edl store --file store.sqlite
      serves one, unless you have Consul or etcd
  --store edl://HOST:29400 (or consul://HOST:8500), or EDL_DISCOVERY in the environment"""

_USAGE = "usage: edl [--version] [--help] COMMAND [ARGUMENT ...]"

EXIT_FAILED, EXIT_USAGE, EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, EXIT_TRY_AGAIN = 1, 2, 141, 130, 75
"""As in a shell: 128 and the signal's number (SIGPIPE, SIGINT); EX_TEMPFAIL of sysexits.h; 2 as argparse has it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `edl`.

    Args:
        argv: the arguments without the program's name; None for this process's own.

    Returns:
        The exit code. `argparse` may raise SystemExit instead.
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
        # The reader of our output has gone (`edl teachers | head`). What is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (EDLError, ModuleNotFoundError) as exc:
        message = str(exc) if isinstance(exc, EDLError) else _commands.explain_missing(exc)
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
    commands = _commands.find()
    if name not in commands:
        near = _commands.nearest(name, commands)
        hint = f"did you mean `edl {near}`?" if near else f"there are {', '.join(commands)}."
        print(f"edl: there is no command {name!r}; {hint} `edl --help` explains.", file=sys.stderr)
        return EXIT_USAGE
    return commands[name].load()(arguments[1:]) or 0


def _help() -> str:
    commands = _commands.find()
    width = max(len(name) for name in commands)
    lines = [f"  {name:<{width}}  {command.summary()}" for name, command in commands.items()]
    listing = "\n".join(["Commands:", *lines])
    ending = "`edl COMMAND --help` explains a command. EDL_TRACEBACK=1 shows where an error came from."
    return "\n\n".join([_USAGE, _INTRODUCTION, listing, _FIRST_STEPS, ending])
