"""The zygote: the process that workers are forked from, which only imports torch and the user's modules.

The agent and the zygote exchange JSON over a Unix socket (`SOCK_SEQPACKET`). The agent sends one `ProgramSpec`, then a
`ForkRequest` for each worker. The zygote answers with `{"ready": true}` and a `PreloadResult`'s fields, then with
`{"pid": ...}` for each fork and, when a worker has ended, with `{"exited": pid, "status": wait status}`.

The zygote must not start threads, run a backward pass or use CUDA, because a fork would inherit them in an unusable
state. If the zygote dies, its workers die too. If the agent dies, the zygote kills the workers and their children, and
ends. A fork runs its script or module as a new interpreter would (`run_main`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import pkgutil
import random
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, Final, NoReturn, cast

from edl.collective.agent.processes import preload

MESSAGE_NBYTES: Final = 1 << 20  # room to receive; a socket's buffer, 212,992 bytes by default, bounds what is sent
_PR_SET_PDEATHSIG: Final = 1  # of prctl(2)
_WAKE_NBYTES: Final = 4096  # ended processes are found by waitpid, so any number of bytes will do
_OPTIMIZER: Final = "torch.optim"
# Variables that every environment has, and that libraries look up again when they use them
_COMMON: Final = {"CI", "HOME", "LNAME", "LOGNAME", "PATH", "TEMP", "TMP", "TMPDIR", "USER", "USERNAME"}
_JOB_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # which Ctrl-C or Slurm sends to a whole job
_COMMAND: Final = (
    # Neither the current folder nor this file's may hide a module of the standard library. The last entry of `sys.path`
    # is where the agent found this package.
    "import sys; sys.path[:1] = filter(None, sys.path[:1]); sys.path.append(sys.argv[3]); "
    "from edl.collective.agent.processes.zygote import main; sys.path.pop(); main()"
)


@dataclass(frozen=True)
class ProgramSpec:
    """The program that workers run."""

    kind: str  # `script` (a Python file), `module` (as for `python -m`) or `program` (anything else, run by exec)
    target: str  # the file, module or program
    arguments: tuple[str, ...] = ()  # the arguments that follow it on the command line
    prewarm: bool = True  # whether to import ahead of time what the program imports first, and `preload`
    framework: str = "torch"  # what the workers train with, `torch` or `paddle`
    preload: tuple[str, ...] = ()  # further modules to import ahead of time
    without: tuple[str, ...] = ()  # modules that workers must import themselves (see the module `preload`)

    def encode(self) -> bytes:
        return json.dumps({"warm": asdict(self)}).encode()


@dataclass(frozen=True)
class ForkRequest:
    """A request to fork a worker."""

    environ: dict[str, str] = field(default_factory=dict)  # added to the zygote's; EDL_STDOUT, EDL_STDERR are files
    stacks: str = ""  # file for its stacks, when SIGUSR2 asks for them; empty for none

    def encode(self) -> bytes:
        return json.dumps({"fork": asdict(self)}).encode()


def zygote_command(descriptor: int, program: ProgramSpec) -> list[str]:
    """Return the command that starts a zygote. `ps` shows the program, and the zygote inherits socket `descriptor`."""
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
    """Do nothing. If the signal were ignored here instead, programs that this process starts would ignore it too."""


def _serve(agent: socket.socket) -> ForkRequest:
    """Fork workers on request. Returns the request in the worker; in the zygote, exits when the agent ends."""
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
        pass  # the agent ended while a message was being sent
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # a worker without its own process group dies with this process
    os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _reap() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, status


def _warm_up(program: ProgramSpec) -> preload.PreloadResult:
    if program.kind == "program":
        return preload.PreloadResult()
    first = _first_in_path(program)
    if not getattr(sys.flags, "safe_path", False):  # `-P` or PYTHONSAFEPATH, since Python 3.11
        sys.path.insert(0, first)
    sys.argv = [program.target, *program.arguments]  # where a module imported by a worker expects them
    if not program.prewarm:
        return preload.PreloadResult()
    scan = _scan(program, Path(first))
    named = [(module, "") for module in program.preload]
    preloaded = preload.PreloadResult()
    with _nvml_check():
        if scan.framework or program.framework in program.preload:
            unfit = _import_framework(program, scan.variables)
            preloaded = preload.preload_modules([*scan.modules, *named], program.without)
            preloaded.unfit |= unfit
        else:
            preloaded = preload.preload_modules(named, program.without)
        if not preloaded.unfit and (hazard := preload.find_fork_hazard()):
            preloaded.unfit[program.framework] = hazard
    if missed := ", ".join(module for module in scan.missed if module not in program.preload):
        what = f"{scan.obstacle} runs before the import of {missed}"
        option = f"--preload {missed.replace(' ', '')}"
        preloaded.failed.append(f"{what} ({option} imports this ahead of time anyway)")
    return preloaded


def _first_in_path(program: ProgramSpec) -> str:
    """Return what the interpreter puts first in `sys.path`."""
    if program.kind == "module":
        return str(Path.cwd())
    if pkgutil.get_importer(program.target) is not None:  # a folder or an archive, with a `__main__.py`
        return absolute_path(program.target)
    return str(Path(program.target).resolve().parent)


def _scan(program: ProgramSpec, folder: Path) -> preload.ProgramImports:
    """Without importing anything, find what the program imports before doing anything else."""
    roots = ("torch" if program.framework == "torch" else "paddle", "numpy", "edl")
    folders = [folder, *map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))]
    if program.kind == "script":
        return preload.scan_imports([Path(program.target)], folders, roots)
    files = preload.sources_of(program.target, [*folders, *map(Path, filter(None, sys.path))])
    if files and files[-1].name == "__init__.py":
        files.append(files[-1].with_name("__main__.py"))  # `python -m PACKAGE` runs it
    return preload.scan_imports(files, folders, roots)


def _import_framework(program: ProgramSpec, variables: frozenset[str]) -> dict[str, str]:
    """Import the framework and what the first optimizer imports. Returns what workers must import themselves, and why.

    `variables` are environment variables that the program may set after it has imported the framework.
    """
    import torch
    import torch.distributed

    if program.framework == "paddle":
        import edl.collective.integrations.paddle  # noqa: F401 - with all of Paddle
    elif _OPTIMIZER not in program.without:
        import torch.nn.parallel

        with undo_side_effects(), preload.watched_environ(variables - _COMMON) as looked_up:
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first optimizer imports torch._dynamo
        if looked_up:  # some 200 variables take effect when torch._dynamo and torch._inductor are imported
            return {_OPTIMIZER: f"reads {', '.join(sorted(looked_up))}, which the program may set first"}
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


# --- A fork becomes the program ---


def redirect_output(environ: Mapping[str, str]) -> None:
    """Redirect the output of this process and its children to the files that `EDL_STDOUT` and `EDL_STDERR` name."""
    for name, stream, descriptor in (("EDL_STDOUT", sys.stdout, 1), ("EDL_STDERR", sys.stderr, 2)):
        path = environ.get(name)
        if path:
            stream.flush()
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(file, descriptor)
            os.close(file)
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=False)  # as if the process had started with a file


# --- Inherited state that a new process would not have ---


_ARG_START: Final = 47  # field of `/proc/self/stat`, counted from 0 (proc_pid_stat(5))


def renew_state() -> None:
    """Renew the state that this newly forked process would otherwise share with all forks of its parent."""
    _seed_generators()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    importlib.invalidate_caches()  # a folder may have appeared since
    main_thread = threading.main_thread()
    if hasattr(main_thread, "_set_native_id"):  # Python renews it only since 3.13
        main_thread._set_native_id()


def limit_threads(environ: Mapping[str, str]) -> None:
    """Make torch, if already imported, use the number of threads in OMP_NUM_THREADS."""
    torch = sys.modules.get("torch")
    number = environ.get("OMP_NUM_THREADS", "")
    if torch is not None and number.isdecimal() and int(number):
        torch.set_num_threads(int(number))


def _seed_generators() -> None:
    """Seed global random generators, which would otherwise produce the same numbers in all forks of a parent."""
    random.seed()
    modules = sys.modules
    if "numpy" in modules:
        modules["numpy"].random.seed()
    if "torch" in modules:
        modules["torch"].default_generator.seed()
    if "paddle" in modules:
        modules["paddle"].framework.core.default_cpu_generator().seed()


def show_command_line(arguments: Sequence[str]) -> None:
    """Make `ps` show new arguments by overwriting the old ones (setproctitle(3)), unless the new ones are longer."""
    before = Path("/proc/self/cmdline").read_bytes()
    begin = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[_ARG_START - 2])
    name, separator, rest = before.partition(b"\0")
    wanted = b"".join(os.fsencode(argument) + b"\0" for argument in arguments)
    if not begin or len(wanted) > len(rest) or ctypes.string_at(begin, len(before)) != before:
        return
    ctypes.memmove(begin + len(name + separator), wanted.ljust(len(rest), b"\0"), len(rest))


@contextmanager
def undo_side_effects() -> Iterator[None]:
    """Restore the environment, warning filters and folder for temporary files after the block."""
    environ = dict(os.environ)
    folder = tempfile.tempdir
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in environ.items() if os.environ.get(name) != value})
        tempfile.tempdir = folder


# --- Running the program as `__main__` ---


_CANNOT_OPEN = 2  # exit code of an interpreter that cannot read its script
_interrupted = False


def arm_interruption() -> None:
    """Make this process end by SIGINT if Ctrl-C ended its script, after the exit functions registered later."""
    atexit.register(_end_by_sigint)


def run_main(kind: str, target: str, arguments: Sequence[str]) -> None:
    """Run a `script` (file, folder or archive) or `module` as `__main__`. Raises SystemExit if it exits or fails."""
    sys.argv = [target, *arguments]
    sys.orig_argv = [*sys.orig_argv[:1], *command_line(kind, target, arguments)]
    program = sys.modules["__main__"].__dict__
    for name in [name for name in program if not name.startswith("__")]:
        del program[name]  # names of the command that started this process
    failure: BaseException | None = None
    try:
        if kind == "module":
            _run_module(target, alter_argv=True)
        elif pkgutil.get_importer(target) is not None:
            _run_module("__main__", alter_argv=False)  # the folder or archive is in `sys.path` already
        else:
            _run_file(absolute_path(target), program)
    except SystemExit as exc:
        if isinstance(exc.code, str):  # of the script, or of `runpy`: there is no such module
            _write_error_file(exc, exc.code)
        raise
    except BaseException as exc:  # noqa: BLE001 - as the interpreter does: reported, and the exit code is 1
        failure = exc
    if failure is not None:  # outside the block above, so that no exception is being handled during the report
        _end_by_exception(failure)


def command_line(kind: str, target: str, arguments: Sequence[str]) -> list[str]:
    """Return what follows the interpreter on the command line of a worker that torchrun starts."""
    return [*(["-u", "-m"] if kind == "module" else ["-u"]), target, *arguments]


def absolute_path(target: str) -> str:
    """Make a script's path absolute without changing anything else in the path, as the interpreter does."""
    return os.path.join(Path.cwd(), target)  # noqa: PTH118 - a `Path` would leave out a `.` inside


def _run_module(name: str, *, alter_argv: bool) -> None:
    # The interpreter itself calls this for `-m`, folders and archives (`pymain_run_module` of CPython).
    run: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
    run(name, alter_argv)


def _run_file(path: str, program: dict[str, Any]) -> None:
    loader = (SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader)("__main__", path)
    program.update(__file__=path, __cached__=None, __loader__=loader, __spec__=None, __doc__=None)
    try:
        if isinstance(loader, SourceFileLoader):
            code = loader.source_to_code(Path(path).read_bytes(), path)  # inherits no `from __future__` of this file
        else:
            code = cast("CodeType", loader.get_code("__main__"))
    except OSError as exc:
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {exc.errno}] {exc.strerror}\n")
        raise SystemExit(_CANNOT_OPEN) from None
    except Exception as exc:  # noqa: BLE001 - raised again, without frames, as an interpreter shows a SyntaxError
        raise exc.with_traceback(None) from None
    exec(code, program)  # noqa: S102 - the user's own script, as `python` runs it


def _end_by_exception(exc: BaseException) -> NoReturn:
    """Save an exception in torchrun's error file, report it as Python does, and exit (1, or 130 after Ctrl-C)."""
    frames = exc.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__package__") == __package__:
        frames = frames.tb_next
    exc = exc.with_traceback(frames)
    if isinstance(exc, KeyboardInterrupt):
        global _interrupted
        _interrupted = True
        if not _is_usual_hook(sys.excepthook):
            _call_excepthook(exc)  # after Ctrl-C, the tracebacks of all ranks would tell nothing
        raise SystemExit(128 + signal.SIGINT)
    text = "".join(traceback.format_exception(type(exc), exc, frames))
    _write_error_file(exc, text)
    with suppress(Exception):
        sys.stdout.flush()
    from edl.collective.agent.health.failures import ExitCause, find_exit_cause

    lost_contact = find_exit_cause(1, text) is ExitCause.PEER_LOST
    if lost_contact:
        what = f"rank {os.environ.get('RANK', '?')} lost contact with another rank ({type(exc).__name__})"
        sys.stderr.write(f"{what}, as a consequence: the cause is in the output of that rank or of the agent\n")
    # If the agent finds no other cause, it shows this traceback.
    if not (lost_contact and _is_usual_hook(sys.excepthook)):
        _call_excepthook(exc)
    raise SystemExit(1)


def _is_usual_hook(hook: Any) -> bool:
    """Return whether an exception hook is the interpreter's, or that hook as wrapped by torch to add the rank."""
    if hook is sys.__excepthook__:
        return True
    if getattr(hook, "__module__", "") != "torch.distributed.distributed_c10d":
        return False
    return any(_is_usual_hook(cell.cell_contents) for cell in hook.__closure__ or ())


def _write_error_file(exc: BaseException, text: str) -> None:
    """Write the agent's error file as torch's `record` does, if the script does not use `record`."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not Path(path).exists():
        details: dict[str, Any] = {"py_callstack": text, "timestamp": str(int(time.time()))}
        message = {"message": {"message": f"{type(exc).__name__}: {exc}", "extraInfo": details}}
        with suppress(OSError):
            Path(path).write_text(json.dumps(message))


def _call_excepthook(exc: BaseException) -> None:
    sys.last_type = type(exc)
    sys.last_value = exc
    sys.last_traceback = exc.__traceback__
    sys.last_exc = exc  # type: ignore[attr-defined]  # since Python 3.12
    try:
        sys.excepthook(type(exc), exc, exc.__traceback__)
    except SystemExit:
        raise
    except BaseException as another:  # noqa: BLE001 - reported together with the first, as the interpreter does
        sys.stderr.write("Error in sys.excepthook:\n")
        frames = another.__traceback__.tb_next if another.__traceback__ is not None else None  # without this function
        sys.__excepthook__(type(another), another.with_traceback(frames), frames)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(exc), exc, exc.__traceback__)
    with suppress(Exception):
        sys.stderr.flush()


def _end_by_sigint() -> None:
    if _interrupted:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
