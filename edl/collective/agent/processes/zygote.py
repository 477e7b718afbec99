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
"""Room to receive a message: more than a socket's buffer (212,992 bytes as Linux comes), which bounds what is sent."""
_PR_SET_PDEATHSIG: Final = 1  # of prctl(2)
_WAKE_NBYTES: Final = 4096  # signals are counted by the processes that have ended, so any number of bytes will do
_OPTIMIZER: Final = "torch.optim"
_COMMON: Final = {"CI", "HOME", "LNAME", "LOGNAME", "PATH", "TEMP", "TMP", "TMPDIR", "USER", "USERNAME"}
"""Variables of every environment: libraries look them up again when they use their values."""
_JOB_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What Ctrl-C, Slurm and systemd send to all processes of a job. The agent acts on it, and so do the workers."""
_COMMAND: Final = (
    # Neither the current folder nor this file's may hide a module of the standard library; the last entry of `sys.path`
    # is where the agent has this package from.
    "import sys; sys.path[:1] = filter(None, sys.path[:1]); sys.path.append(sys.argv[3]); "
    "from edl.collective.agent.processes.zygote import main; sys.path.pop(); main()"
)


@dataclass(frozen=True)
class ProgramSpec:
    """The program that workers run.

    Attributes:
        kind: `script` (a Python file), `module` (as `python -m` runs) or `program` (any other, run by exec).
        target: the file, module or program.
        arguments: what follows it in the command line.
        prewarm: whether to import anything ahead of time: the framework and numpy, where the program imports them
            before it does anything else (see `edl.collective.agent.processes.preload`), and `preload`.
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
        """Return the message that begins a zygote's work."""
        return json.dumps({"warm": asdict(self)}).encode()


@dataclass(frozen=True)
class ForkRequest:
    """The request for a worker.

    Attributes:
        environ: the worker's environment, added to the zygote's. `EDL_STDOUT` and `EDL_STDERR` are files that it writes
            to.
        stacks: a file for its stacks, when SIGUSR2 asks for them; empty for none.
    """

    environ: dict[str, str] = field(default_factory=dict)
    stacks: str = ""

    def encode(self) -> bytes:
        """Return the message that has a zygote fork."""
        return json.dumps({"fork": asdict(self)}).encode()


def zygote_command(descriptor: int, program: ProgramSpec) -> list[str]:
    """Return the command that starts a zygote.

    Args:
        descriptor: the zygote's end of the socket, which it inherits.
        program: its name and arguments stand in the command for people who look for it with `ps`.

    Returns:
        The command's words.
    """
    package = Path(__file__).parents[3]
    shown = [program.target, *program.arguments]
    return [sys.executable, "-u", "-c", _COMMAND, str(descriptor), str(os.getpid()), str(package), *shown]


def main() -> None:
    """Run the zygote, with the arguments of `zygote_command`. Returns, in a worker, when the script has ended."""
    descriptor, parent = map(int, sys.argv[1:3])
    os.setpgid(0, 0)  # so that it is killed together with what an import started
    _die_with(parent)
    agent = socket.socket(fileno=descriptor)
    arm_interruption()
    handlers = {number: signal.getsignal(number) for number in _JOB_SIGNALS}
    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:  # what is ignored stays so in all that this process starts
            signal.signal(number, _leave_to_agent)
    request = json.loads(agent.recv(MESSAGE_NBYTES) or "{}")
    if "warm" not in request:
        return
    program = ProgramSpec(**request["warm"])
    preloaded = _warm_up(program)
    gc.collect()
    gc.freeze()  # what is here now will not be written to by a worker's collector, and so stays shared
    agent.send(json.dumps({"ready": True, "unfit": preloaded.unfit, "failed": preloaded.failed}).encode())
    zygote = os.getpid()
    # From here on the end of `agent` tells of the agent's death, and the workers' children can still be killed then. A
    # zygote that was stopped (SIGSTOP) has to be woken for that.
    _die_with(parent, signal.SIGCONT)
    fork = _serve(agent)
    agent.close()
    _die_with(zygote)
    os.setsid()  # so that it is killed together with its own children, such as a DataLoader's workers
    handlers[signal.SIGINT] = signal.default_int_handler
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _JOB_SIGNALS)
    _become_worker(program, fork)


def _leave_to_agent(number: int, frame: object) -> None:
    """Do nothing: programs that this process starts act on the signal, which they would not if it were ignored here."""


def _serve(agent: socket.socket) -> ForkRequest:
    """Fork workers as they are asked for. Returns in a worker, with what was asked; ends the zygote with its agent."""
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for _ in _reap():
        pass  # what an imported module had started may have ended before there was a handler
    workers: set[int] = set()
    try:
        while True:
            readable, _, _ = select.select([agent.fileno(), wake], [], [])
            if wake in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, _WAKE_NBYTES)
                for pid, status in _reap():
                    if pid in workers:  # and not a process that an imported module had started
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
        pass  # the agent has gone while a message was sent
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # a worker without a group of its own yet dies with this process
    os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _reap() -> Iterator[tuple[int, int]]:
    """Yield process id and wait status of the children that have ended."""
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
    sys.argv = [program.target, *program.arguments]  # as a module finds them that a worker imports
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
    if scan.obstacle and program.framework not in program.preload:
        what = f"{scan.obstacle} runs before {program.framework} is imported"
        preloaded.failed.append(f"{what} (--preload {program.framework} has it imported ahead of time all the same)")
    return preloaded


def _first_in_path(program: ProgramSpec) -> str:
    """Return what the interpreter puts first into `sys.path`."""
    if program.kind == "module":
        return str(Path.cwd())
    if pkgutil.get_importer(program.target) is not None:  # a folder or an archive, with a `__main__.py`
        return absolute_path(program.target)
    return str(Path(program.target).resolve().parent)


def _scan(program: ProgramSpec, folder: Path) -> ProgramImports:
    """Find what the program imports before it does anything else; nothing is imported for that."""
    roots = ("torch" if program.framework == "torch" else "paddle", "numpy", "edl")
    folders = [folder, *map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))]
    if program.kind == "script":
        return scan_imports([Path(program.target)], folders, roots)
    files = sources_of(program.target, [*folders, *map(Path, filter(None, sys.path))])
    if files and files[-1].name == "__init__.py":
        files.append(files[-1].with_name("__main__.py"))  # which `python -m PACKAGE` runs
    return scan_imports(files, folders, roots)


def _import_framework(program: ProgramSpec, variables: frozenset[str]) -> dict[str, str]:
    """Import the framework and what the first optimizer imports.

    Args:
        program: says which framework, and what to leave out.
        variables: names of variables of the environment that the program may set after it has imported the framework.

    Returns:
        Why every worker must import a module by itself, by module.
    """
    import torch
    import torch.distributed

    if program.framework == "paddle":
        import edl.collective.integrations.paddle  # noqa: F401 - with all of Paddle
    elif _OPTIMIZER not in program.without:
        import torch.nn.parallel

        with undo_side_effects(), watched_environ(variables - _COMMON) as looked_up:
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first optimizer imports torch._dynamo
        if looked_up:  # some 200 variables have their effect when torch._dynamo and torch._inductor are imported
            return {_OPTIMIZER: f"reads {', '.join(sorted(looked_up))}, which the program may set before"}
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


def _become_worker(program: ProgramSpec, fork: ForkRequest) -> None:
    """Make this process, just forked, a worker, and run the script."""
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
    """Have the kernel kill this process, or send it another signal, when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it had died before
        os._exit(1)
