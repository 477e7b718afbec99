"""The process that workers are forked from: it has imported torch and what the user names, and done nothing else.

Importing torch and making the first optimizer take some two seconds; a fork of a process that has done both takes
milliseconds. The agent starts `python -m edl.collective.agent.zygote FD PID`, PID being its own, and both talk JSON
over the Unix socket FD (`SOCK_SEQPACKET`): the agent says `Warm` once and then `Fork`; the zygote answers
`{"ready": true}` with what went wrong, `{"pid": ...}` and, when a worker ended, `{"exited": pid, "status": wait
status}`. It must not start threads, run a backward pass or touch CUDA: a fork would inherit the wreck. A worker dies
when the zygote does; when the agent dies the zygote kills the workers, with their children, and ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import time
import traceback
import types
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from edl.collective.agent.preload import Preloaded, fork_hazard, preload
from edl.collective.agent.program_imports import ProgramImports, scan_imports, sources_of
from edl.collective.agent.streams import redirect

__all__ = ["Fork", "Warm", "main"]

_PR_SET_PDEATHSIG = 1
_MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Warm:
    """What workers will run, said once.

    Attributes:
        kind: `script` (a Python file), `module` (as `python -m` runs) or `program` (any other, run by exec).
        target: the file, module or program.
        prewarm: whether to import anything ahead of time: the framework and numpy, where the program imports them
            before it does anything else (see `edl.collective.agent.program_imports`), and `preload`.
        framework: what the workers train with, `torch` or `paddle`.
        preload: modules to import ahead of time as well.
        without: modules that workers must import by themselves (see `edl.collective.agent.preload`).
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
class Fork:
    """One worker.

    Attributes:
        environ: its environment, added to the zygote's. `EDL_STDOUT` and `EDL_STDERR` are files that it writes to.
        stacks: a file for its stacks, when SIGUSR2 asks for them; empty for none.
    """

    environ: dict[str, str] = field(default_factory=dict)
    stacks: str = ""

    def encode(self) -> bytes:
        return json.dumps({"fork": asdict(self)}).encode()


def main(argv: Sequence[str] | None = None) -> None:
    """The process itself. Returns, in a worker, when the script has ended."""
    arguments = sys.argv[1:] if argv is None else argv
    os.setpgid(0, 0)  # so that it is killed together with what an import started
    _die_with(int(arguments[1]))
    agent = socket.socket(fileno=int(arguments[0]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's to act on
    request = json.loads(agent.recv(_MESSAGE_BYTES) or "{}")
    if "warm" not in request:
        return
    warm = Warm(**request["warm"])
    done = _warm_up(warm)
    gc.collect()
    gc.freeze()  # what is here now will not be written to by a worker's collector, and so stays shared
    agent.send(json.dumps({"ready": True, "unfit": done.unfit, "failed": done.failed}).encode())
    zygote = os.getpid()
    # From here on the end of `agent` tells of the agent's death, and the workers' children can still be killed then. A
    # zygote that somebody stopped has to be woken for that.
    _die_with(int(arguments[1]), signal.SIGCONT)
    fork = _serve(agent)
    agent.close()
    _die_with(zygote)
    _become(warm, fork)


def _serve(agent: socket.socket) -> Fork:
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
                fork = Fork(**json.loads(message)["fork"])
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    os.close(wake)
                    os.close(woken)
                    return fork
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


def _warm_up(warm: Warm) -> Preloaded:
    """Import what may be imported ahead of time."""
    if warm.kind == "program":
        return Preloaded()
    folder = Path(warm.target).resolve().parent if warm.kind == "script" else Path.cwd()
    sys.path[0] = str(folder)
    sys.argv = [warm.target, *warm.arguments]  # as a module finds them that a worker imports
    if not warm.prewarm:
        return Preloaded()
    scan = _scan(warm, folder)
    named = [(module, "") for module in warm.preload]
    done = Preloaded()
    with _nvml_check():
        if scan.framework or warm.framework in warm.preload:
            _import_framework(warm.framework)
            done = preload([*scan.modules, *named], warm.without)
        else:
            done = preload(named, warm.without)
        if not done.unfit and (hazard := fork_hazard()):
            done.unfit[warm.framework] = hazard
    if scan.obstacle and warm.framework not in warm.preload:
        what = f"{scan.obstacle} runs before {warm.framework} is imported"
        done.failed.append(f"{what} (--preload {warm.framework} has it imported ahead of time all the same)")
    return done


def _scan(warm: Warm, folder: Path) -> ProgramImports:
    """What the program imports before it does anything else. A module is looked for without importing its packages."""
    roots = ("torch" if warm.framework == "torch" else "paddle", "numpy", "edl")
    folders = [folder, *map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))]
    if warm.kind == "script":
        return scan_imports([Path(warm.target)], folders, roots)
    files = sources_of(warm.target, [*folders, *map(Path, filter(None, sys.path))])
    if files and files[-1].name == "__init__.py":
        files.append(files[-1].with_name("__main__.py"))  # which `python -m PACKAGE` runs
    return scan_imports(files, folders, roots)


def _import_framework(framework: str) -> None:
    import torch
    import torch.distributed

    if framework == "paddle":
        import edl.collective.paddle.training  # noqa: F401 - with all of Paddle
    else:
        import torch.nn.parallel

        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first optimizer imports torch._dynamo


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


def _become(warm: Warm, fork: Fork) -> None:
    """This process, just forked, becomes a worker and runs the script."""
    os.setpgid(0, 0)  # so that it is killed together with its own children, such as a DataLoader's workers
    for number in (signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(fork.environ)
    redirect(os.environ)
    if warm.kind == "program":
        os.execvpe(warm.target, [warm.target, *warm.arguments], os.environ)
    _seed_generators()
    if fork.stacks:
        from edl.collective.agent.stacks import arm_stack_dump

        arm_stack_dump(Path(fork.stacks))
    from edl.collective.board import Board

    if "EDL_BOARD" in fork.environ:
        Board.from_env().begin(int(fork.environ["EDL_GENERATION"]))
    sys.argv = [warm.target, *warm.arguments]
    try:
        _run(warm)
    except SystemExit:
        raise
    except KeyboardInterrupt:  # Ctrl-C: end by the signal, as Python does, and without a traceback
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as exc:  # noqa: BLE001 - as the interpreter does: say it, and end with 1
        _fail(exc)


def _seed_generators() -> None:
    """Seed global generators as a new process has them: a fork begins with its parent's numbers, all forks alike."""
    random.seed()
    modules = sys.modules
    if "numpy" in modules:
        modules["numpy"].random.seed()
    if "torch" in modules:
        modules["torch"].default_generator.seed()
    if "paddle" in modules:
        modules["paddle"].framework.core.default_cpu_generator().seed()


def _run(warm: Warm) -> None:
    if warm.kind == "module":
        runpy.run_module(warm.target, run_name="__main__", alter_sys=True)
        return
    program = types.ModuleType("__main__")
    program.__dict__.update(__file__=warm.target, __builtins__=__builtins__, __spec__=None)
    sys.modules["__main__"] = program
    code = compile(Path(warm.target).read_bytes(), warm.target, "exec")
    exec(code, program.__dict__)  # noqa: S102 - the user's own script, as `python` runs it


def _fail(exc: BaseException) -> NoReturn:
    """Leave the exception where torchrun's users look for it, print it without frames of this module, and end."""
    frames = exc.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
        frames = frames.tb_next
    exc = exc.with_traceback(frames)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")  # written for the agent, as torch's `record` does
    text = "".join(traceback.format_exception(exc))
    if path and not Path(path).exists():
        details: dict[str, Any] = {"py_callstack": text, "timestamp": str(int(time.time()))}
        message = {"message": {"message": f"{type(exc).__name__}: {exc}", "extraInfo": details}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(message))
    sys.stdout.flush()
    from edl.collective.agent.failures import Kind, kind_of

    if kind_of(1, text) is Kind.CONTACT:  # somebody else's end, of which the agent will tell
        text = f"rank {os.environ.get('RANK', '?')} lost contact with another one ({type(exc).__name__})\n"
    sys.stderr.write(text)
    sys.stderr.flush()
    raise SystemExit(1)


def _die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Be killed, or signalled otherwise, when the process `parent`, which started this one, dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it had died before
        os._exit(1)


if __name__ == "__main__":
    main()
