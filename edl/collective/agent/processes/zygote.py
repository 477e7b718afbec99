"""The process that workers are forked from: it has imported torch and what the user names, and done nothing else.

Importing torch and making the first optimizer take some two seconds; a fork of a process that has done both takes
milliseconds. The agent starts `zygote_command`, and both talk JSON over a Unix socket (`SOCK_SEQPACKET`): the agent
sends a `ProgramSpec` once and then a `ForkRequest` for each worker; the zygote answers `{"ready": true}` with what went
wrong, `{"pid": ...}` and, when a worker ended, `{"exited": pid, "status": wait status}`. It must not start threads, run
a backward pass or touch CUDA: a fork would inherit what is left of them. A worker dies when the zygote does; when the
agent dies the zygote kills the workers, with their children, and ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import pkgutil
import select
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from edl.collective.agent.processes.forked_state import limit_threads, renew_state, show_command_line, undo_side_effects
from edl.collective.agent.processes.main_program import absolute_path, arm_interruption, command_line, run_main
from edl.collective.agent.processes.preload import PreloadResult, find_fork_hazard, preload_modules, watched_environ
from edl.collective.agent.processes.program_imports import ProgramImports, scan_imports, sources_of
from edl.collective.agent.processes.redirection import redirect_output

__all__ = ["ForkRequest", "ProgramSpec", "main", "zygote_command"]

_PR_SET_PDEATHSIG = 1
_MESSAGE_BYTES = 1 << 20
_OPTIMIZER: Final = "torch.optim"
_OF_EVERYBODY: Final = {"CI", "HOME", "LNAME", "LOGNAME", "PATH", "TEMP", "TMP", "TMPDIR", "USER", "USERNAME"}
"""Variables that are looked up again when their values are used."""
_UNHEEDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What Ctrl-C, Slurm and systemd send to all processes of a job. The agent acts on it, and so do the workers."""
_COMMAND: Final = (
    # Neither the current folder nor this file's may hide a module of the standard library; the last entry of `sys.path`
    # is where the agent has this package from.
    "import sys; sys.path[:1] = filter(None, sys.path[:1]); sys.path.append(sys.argv[3]); "
    "from edl.collective.agent.processes.zygote import main; sys.path.pop(); main()"
)


@dataclass(frozen=True)
class ProgramSpec:
    """What workers will run, said once.

    Attributes:
        kind: `script` (a Python file), `module` (as `python -m` runs) or `program` (any other, run by exec).
        target: the file, module or program.
        prewarm: whether to import anything ahead of time: the framework and numpy, where the program imports them
            before it does anything else (see `edl.collective.agent.processes.program_imports`), and `preload`.
        framework: what the workers train with, `torch` or `paddle`.
        preload: modules to import ahead of time as well.
        without: modules that workers must import by themselves (see `edl.collective.agent.processes.preload`).
    """

    kind: str
    target: str
    arguments: tuple[str, ...] = ()
    prewarm: bool = True
    framework: str = "torch"
    preload: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def encode(self) -> bytes:
        return json.dumps({"warm": asdict(self)}).encode()


@dataclass(frozen=True)
class ForkRequest:
    """One worker.

    Attributes:
        environ: its environment, added to the zygote's. `EDL_STDOUT` and `EDL_STDERR` are files that it writes to.
        stacks: a file for its stacks, when SIGUSR2 asks for them; empty for none.
    """

    environ: dict[str, str] = field(default_factory=dict)
    stacks: str = ""

    def encode(self) -> bytes:
        return json.dumps({"fork": asdict(self)}).encode()


def zygote_command(descriptor: int, warm: ProgramSpec) -> list[str]:
    """Return the command that starts a zygote.

    Args:
        descriptor: the zygote's end of the socket, which it inherits.
        warm: the program's name and arguments stand in the command for people who look for it with `ps`.
    """
    package = Path(__file__).parents[3]
    shown = [warm.target, *warm.arguments]
    return [sys.executable, "-u", "-c", _COMMAND, str(descriptor), str(os.getpid()), str(package), *shown]


def main() -> None:
    """Be the zygote, with the arguments of `zygote_command`. Returns, in a worker, when the script has ended."""
    descriptor, parent = map(int, sys.argv[1:3])
    os.setpgid(0, 0)  # so that it is killed together with what an import started
    _die_with(parent)
    agent = socket.socket(fileno=descriptor)
    arm_interruption()
    handlers = {number: signal.getsignal(number) for number in _UNHEEDED}
    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:  # what is ignored stays so in all that this process starts
            signal.signal(number, _leave_to_agent)
    request = json.loads(agent.recv(_MESSAGE_BYTES) or "{}")
    if "warm" not in request:
        return
    warm = ProgramSpec(**request["warm"])
    done = _warm_up(warm)
    gc.collect()
    gc.freeze()  # what is here now will not be written to by a worker's collector, and so stays shared
    agent.send(json.dumps({"ready": True, "unfit": done.unfit, "failed": done.failed}).encode())
    zygote = os.getpid()
    # From here on the end of `agent` tells of the agent's death, and the workers' children can still be killed then. A
    # zygote that somebody stopped has to be woken for that.
    _die_with(parent, signal.SIGCONT)
    fork = _serve(agent)
    agent.close()
    _die_with(zygote)
    os.setsid()  # so that it is killed together with its own children, such as a DataLoader's workers
    handlers[signal.SIGINT] = signal.default_int_handler
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _UNHEEDED)
    _become(warm, fork)


def _leave_to_agent(number: int, frame: object) -> None:
    """Do nothing: programs that this process starts heed the signal, which they would not if it were ignored here."""


def _serve(agent: socket.socket) -> ForkRequest:
    """Fork workers as they are asked for. Returns in a worker, with what was asked; ends the zygote with its agent."""
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for _ in _reap():
        pass  # what an imported module had started may have ended before anybody listened
    workers: set[int] = set()
    try:
        while True:
            readable, _, _ = select.select([agent.fileno(), wake], [], [])
            if wake in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
                for pid, status in _reap():
                    if pid in workers:  # and not a process that an imported module had started
                        workers.discard(pid)
                        agent.send(json.dumps({"exited": pid, "status": status}).encode())
            if agent.fileno() in readable:
                message = agent.recv(_MESSAGE_BYTES)
                if not message:
                    break
                fork = ForkRequest(**json.loads(message)["fork"])
                signal.pthread_sigmask(signal.SIG_BLOCK, _UNHEEDED)  # the worker heeds them from its beginning
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    os.close(wake)
                    os.close(woken)
                    return fork
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _UNHEEDED)
                workers.add(pid)
                agent.send(json.dumps({"pid": pid}).encode())
    except OSError:
        pass  # the agent has gone while it was told something
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # one without a group of its own yet dies with this process
    os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _reap() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, status


def _warm_up(warm: ProgramSpec) -> PreloadResult:
    """Import what may be imported ahead of time."""
    if warm.kind == "program":
        return PreloadResult()
    first = _first_in_path(warm)
    if not getattr(sys.flags, "safe_path", False):  # `-P` or PYTHONSAFEPATH, since Python 3.11
        sys.path.insert(0, first)
    sys.argv = [warm.target, *warm.arguments]  # as a module finds them that a worker imports
    if not warm.prewarm:
        return PreloadResult()
    scan = _scan(warm, Path(first))
    named = [(module, "") for module in warm.preload]
    done = PreloadResult()
    with _nvml_check():
        if scan.framework or warm.framework in warm.preload:
            unfit = _import_framework(warm, scan.variables)
            done = preload_modules([*scan.modules, *named], warm.without)
            done.unfit |= unfit
        else:
            done = preload_modules(named, warm.without)
        if not done.unfit and (hazard := find_fork_hazard()):
            done.unfit[warm.framework] = hazard
    if scan.obstacle and warm.framework not in warm.preload:
        what = f"{scan.obstacle} runs before {warm.framework} is imported"
        done.failed.append(f"{what} (--preload {warm.framework} has it imported ahead of time all the same)")
    return done


def _first_in_path(warm: ProgramSpec) -> str:
    """Return what the interpreter puts first into `sys.path`."""
    if warm.kind == "module":
        return str(Path.cwd())
    if pkgutil.get_importer(warm.target) is not None:  # a folder or an archive, with a `__main__.py`
        return absolute_path(warm.target)
    return str(Path(warm.target).resolve().parent)


def _scan(warm: ProgramSpec, folder: Path) -> ProgramImports:
    """What the program imports before it does anything else. A module is looked for without importing its packages."""
    roots = ("torch" if warm.framework == "torch" else "paddle", "numpy", "edl")
    folders = [folder, *map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))]
    if warm.kind == "script":
        return scan_imports([Path(warm.target)], folders, roots)
    files = sources_of(warm.target, [*folders, *map(Path, filter(None, sys.path))])
    if files and files[-1].name == "__init__.py":
        files.append(files[-1].with_name("__main__.py"))  # which `python -m PACKAGE` runs
    return scan_imports(files, folders, roots)


def _import_framework(warm: ProgramSpec, variables: frozenset[str]) -> dict[str, str]:
    """Import the framework and what the first optimizer imports; return what of it workers must import by themselves.

    Args:
        variables: names of variables of the environment that the program may set after it has imported the framework.
    """
    import torch
    import torch.distributed

    if warm.framework == "paddle":
        import edl.collective.paddle.training  # noqa: F401 - with all of Paddle
    elif _OPTIMIZER not in warm.without:
        import torch.nn.parallel

        with undo_side_effects(), watched_environ(variables - _OF_EVERYBODY) as asked:
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first one imports torch._dynamo
        if asked:  # some 200 variables have their effect when torch._dynamo and torch._inductor are imported
            return {_OPTIMIZER: f"reads {', '.join(sorted(asked))}, which the program may set before"}
    return {}


@contextlib.contextmanager
def _nvml_check() -> Iterator[None]:
    """Have `torch.cuda.is_available` ask NVML, which leaves forks alone, in place of CUDA's driver.

    https://docs.pytorch.org/docs/stable/generated/torch.cuda.is_available.html
    """
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _become(warm: ProgramSpec, fork: ForkRequest) -> None:
    """This process, just forked, becomes a worker and runs the script."""
    os.environ.update(fork.environ)
    redirect_output(os.environ)
    if warm.kind == "program":
        os.execvpe(warm.target, [warm.target, *warm.arguments], os.environ)
    renew_state()
    limit_threads(fork.environ)
    show_command_line(command_line(warm.kind, warm.target, warm.arguments))
    if fork.stacks:
        from edl.collective.agent.processes.stack_dump import arm_stack_dump

        arm_stack_dump(Path(fork.stacks))
    from edl.collective.worker_status import WorkerStatusPage

    if "EDL_BOARD" in fork.environ:
        WorkerStatusPage.from_env().record_worker_start(int(fork.environ["EDL_GENERATION"]))
    run_main(warm.kind, warm.target, warm.arguments)


def _die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Be killed, or signalled otherwise, when the process `parent`, which started this one, dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it had died before
        os._exit(1)
