"""The zygote: the process that workers are forked from, which only imports torch and the user's modules.

Importing torch and making the first optimizer takes about two seconds; forking a process that has done both takes
milliseconds. The agent starts `zygote_command` and talks JSON with it over a Unix socket (`SOCK_SEQPACKET`). It sends
one `ProgramSpec`, then a `ForkRequest` for each worker. The zygote answers `{"ready": true}` with what went wrong,
`{"pid": ...}` for each fork and, when a worker ended, `{"exited": pid, "status": wait status}`.

The zygote must not start threads, run a backward pass or touch CUDA, because a fork would inherit what is left of them.
If it dies, its workers die too. If the agent dies, it kills the workers and their children, and ends.
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

from edl.collective.agent.processes.main_program import (
    absolute_path,
    arm_interruption,
    command_line,
    limit_threads,
    redirect_output,
    renew_state,
    run_main,
    show_command_line,
    undo_side_effects,
)
from edl.collective.agent.processes.preload import (
    PreloadResult,
    ProgramImports,
    find_fork_hazard,
    preload_modules,
    scan_imports,
    sources_of,
    watched_environ,
)

__all__ = ["MESSAGE_NBYTES", "ForkRequest", "ProgramSpec", "main", "zygote_command"]

MESSAGE_NBYTES: Final = 1 << 20
"""Room to receive a message. A socket's buffer, 212,992 bytes by default on Linux, bounds what is sent."""
_PR_SET_PDEATHSIG: Final = 1  # of prctl(2)
_WAKE_NBYTES: Final = 4096  # ended processes are found by waitpid, so any number of bytes will do
_OPTIMIZER: Final = "torch.optim"
_COMMON: Final = {"CI", "HOME", "LNAME", "LOGNAME", "PATH", "TEMP", "TMP", "TMPDIR", "USER", "USERNAME"}
"""Variables that every environment has. Libraries look them up again whenever they use their values."""
_JOB_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that Ctrl-C, Slurm and systemd send to all processes of a job.

The agent acts on them, and so do the workers.
"""
_COMMAND: Final = (
    # Neither the current folder nor this file's may hide a module of the standard library. The last entry of `sys.path`
    # is where the agent found this package.
    "import sys; sys.path[:1] = filter(None, sys.path[:1]); sys.path.append(sys.argv[3]); "
    "from edl.collective.agent.processes.zygote import main; sys.path.pop(); main()"
)


@dataclass(frozen=True)
class ProgramSpec:
    """The program that workers run.

    Attributes:
        kind: `script` (a Python file), `module` (as for `python -m`) or `program` (anything else, run by exec).
        target: The file, module or program.
        arguments: The arguments that follow it on the command line.
        prewarm: Whether to import ahead of time what the program imports first (see
            `edl.collective.agent.processes.preload`), and `preload`.
        framework: What the workers train with, `torch` or `paddle`.
        preload: Further modules to import ahead of time.
        without: Modules that workers must import themselves (see `edl.collective.agent.processes.preload`).
    """

    kind: str
    target: str
    arguments: tuple[str, ...] = ()
    prewarm: bool = True
    framework: str = "torch"
    preload: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Return the message that starts a zygote's work."""
        return json.dumps({"warm": asdict(self)}).encode()


@dataclass(frozen=True)
class ForkRequest:
    """A request to fork a worker.

    Attributes:
        environ: Environment variables of the worker, added to the zygote's. `EDL_STDOUT` and `EDL_STDERR` are files for
            its output.
        stacks: File for its stacks, when SIGUSR2 asks for them; empty for none.
    """

    environ: dict[str, str] = field(default_factory=dict)
    stacks: str = ""

    def encode(self) -> bytes:
        """Return the message that makes a zygote fork."""
        return json.dumps({"fork": asdict(self)}).encode()


def zygote_command(descriptor: int, program: ProgramSpec) -> list[str]:
    """Return the command that starts a zygote, with the socket's inherited end as `descriptor`.

    The command contains the program's name and arguments, so that people find it with `ps`.
    """
    package = Path(__file__).parents[3]
    shown = [program.target, *program.arguments]
    return [sys.executable, "-u", "-c", _COMMAND, str(descriptor), str(os.getpid()), str(package), *shown]


def main() -> None:
    """Run the zygote with the arguments of `zygote_command`. In a worker, return when the script has ended."""
    descriptor, parent = map(int, sys.argv[1:3])
    os.setpgid(0, 0)  # to be killed together with what an import started
    _die_with(parent)
    agent = socket.socket(fileno=descriptor)
    arm_interruption()
    handlers = {number: signal.getsignal(number) for number in _JOB_SIGNALS}
    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:  # ignored signals stay ignored in everything this process starts
            signal.signal(number, _leave_to_agent)
    request = json.loads(agent.recv(MESSAGE_NBYTES) or "{}")
    if "warm" not in request:
        return
    program = ProgramSpec(**request["warm"])
    preloaded = _warm_up(program)
    gc.collect()
    gc.freeze()  # memory that exists now is not written to by a worker's collector, and so stays shared
    agent.send(json.dumps({"ready": True, "unfit": preloaded.unfit, "failed": preloaded.failed}).encode())
    zygote = os.getpid()
    # From here on, the end of `agent` reports the agent's death, in time to kill the workers' children. A zygote that
    # was stopped (SIGSTOP) must be woken for that.
    _die_with(parent, signal.SIGCONT)
    fork = _serve(agent)
    agent.close()
    _die_with(zygote)
    os.setsid()  # to be killed together with its own children, such as a DataLoader's workers
    handlers[signal.SIGINT] = signal.default_int_handler
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _JOB_SIGNALS)
    _become_worker(program, fork)


def _leave_to_agent(number: int, frame: object) -> None:
    """Do nothing. Programs that this process starts act on the signal, but would not if it were ignored here."""


def _serve(agent: socket.socket) -> ForkRequest:
    """Fork workers on request. Returns the request in the worker; in the zygote, ends the process with its agent."""
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for _ in _reap():
        pass  # a process started by an imported module may have ended before there was a handler
    workers: set[int] = set()
    try:
        while True:
            readable, _, _ = select.select([agent.fileno(), wake], [], [])
            if wake in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, _WAKE_NBYTES)
                for pid, status in _reap():
                    if pid in workers:  # not a process that an imported module started
                        workers.discard(pid)
                        agent.send(json.dumps({"exited": pid, "status": status}).encode())
            if agent.fileno() in readable:
                message = agent.recv(MESSAGE_NBYTES)
                if not message:
                    break
                fork = ForkRequest(**json.loads(message)["fork"])
                signal.pthread_sigmask(signal.SIG_BLOCK, _JOB_SIGNALS)  # until the worker has its handlers
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    os.close(wake)
                    os.close(woken)
                    return fork
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _JOB_SIGNALS)
                workers.add(pid)
                agent.send(json.dumps({"pid": pid}).encode())
    except OSError:
        pass  # the agent went away while a message was being sent
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # a worker without its own process group dies with this process
    os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _reap() -> Iterator[tuple[int, int]]:
    """Yield the process id and wait status of each child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, status


def _warm_up(program: ProgramSpec) -> PreloadResult:
    """Import what may be imported ahead of time."""
    if program.kind == "program":
        return PreloadResult()
    first = _first_in_path(program)
    if not getattr(sys.flags, "safe_path", False):  # `-P` or PYTHONSAFEPATH, since Python 3.11
        sys.path.insert(0, first)
    sys.argv = [program.target, *program.arguments]  # where a module imported by a worker expects them
    if not program.prewarm:
        return PreloadResult()
    scan = _scan(program, Path(first))
    named = [(module, "") for module in program.preload]
    preloaded = PreloadResult()
    with _nvml_check():
        if scan.framework or program.framework in program.preload:
            unfit = _import_framework(program, scan.variables)
            preloaded = preload_modules([*scan.modules, *named], program.without)
            preloaded.unfit |= unfit
        else:
            preloaded = preload_modules(named, program.without)
        if not preloaded.unfit and (hazard := find_fork_hazard()):
            preloaded.unfit[program.framework] = hazard
    if missed := ", ".join(module for module in scan.missed if module not in program.preload):
        what = f"{scan.obstacle} runs before the import of {missed}"
        option = f"--preload {missed.replace(' ', '')}"
        preloaded.failed.append(f"{what} ({option} has this imported ahead of time all the same)")
    return preloaded


def _first_in_path(program: ProgramSpec) -> str:
    """Return what the interpreter puts first in `sys.path`."""
    if program.kind == "module":
        return str(Path.cwd())
    if pkgutil.get_importer(program.target) is not None:  # a folder or an archive, with a `__main__.py`
        return absolute_path(program.target)
    return str(Path(program.target).resolve().parent)


def _scan(program: ProgramSpec, folder: Path) -> ProgramImports:
    """Find what the program imports before it does anything else, without importing anything."""
    roots = ("torch" if program.framework == "torch" else "paddle", "numpy", "edl")
    folders = [folder, *map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))]
    if program.kind == "script":
        return scan_imports([Path(program.target)], folders, roots)
    files = sources_of(program.target, [*folders, *map(Path, filter(None, sys.path))])
    if files and files[-1].name == "__init__.py":
        files.append(files[-1].with_name("__main__.py"))  # `python -m PACKAGE` runs it
    return scan_imports(files, folders, roots)


def _import_framework(program: ProgramSpec, variables: frozenset[str]) -> dict[str, str]:
    """Import the framework and what the first optimizer imports.

    `variables` are environment variables that the program may set after it has imported the framework. Returns why
    every worker must import a module itself, by module.
    """
    import torch
    import torch.distributed

    if program.framework == "paddle":
        import edl.collective.integrations.paddle  # noqa: F401 - with all of Paddle
    elif _OPTIMIZER not in program.without:
        import torch.nn.parallel

        with undo_side_effects(), watched_environ(variables - _COMMON) as looked_up:
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first optimizer imports torch._dynamo
        if looked_up:  # some 200 variables take effect when torch._dynamo and torch._inductor are imported
            return {_OPTIMIZER: f"reads {', '.join(sorted(looked_up))}, which the program may set before"}
    return {}


@contextlib.contextmanager
def _nvml_check() -> Iterator[None]:
    """Make `torch.cuda.is_available` ask NVML, which does not affect forks, instead of CUDA's driver.

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


def _become_worker(program: ProgramSpec, fork: ForkRequest) -> None:
    """Turn this process, which was just forked, into a worker, and run the script."""
    os.environ.update(fork.environ)
    redirect_output(os.environ)
    if program.kind == "program":
        os.execvpe(program.target, [program.target, *program.arguments], os.environ)
    renew_state()
    limit_threads(fork.environ)
    show_command_line(command_line(program.kind, program.target, program.arguments))
    if fork.stacks:
        from edl.collective.agent.processes.stack_dump import arm_stack_dump

        arm_stack_dump(Path(fork.stacks))
    from edl.collective.worker_status import WorkerStatusPage

    if "EDL_BOARD" in fork.environ:
        WorkerStatusPage.from_env().record_worker_start(int(fork.environ["EDL_GENERATION"]))
    run_main(program.kind, program.target, program.arguments)


def _die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Make the kernel kill this process, or send it another signal, when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before prctl
        os._exit(1)
