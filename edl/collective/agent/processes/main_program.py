"""Runs a script or module in a forked process as a new interpreter would: its `__main__`, exceptions and exit."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import io
import json
import os
import pkgutil
import random
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, Final, NoReturn, cast

__all__ = [
    "absolute_path",
    "arm_interruption",
    "command_line",
    "limit_threads",
    "redirect_output",
    "renew_state",
    "run_main",
    "show_command_line",
    "undo_side_effects",
]


def redirect_output(environ: Mapping[str, str]) -> None:
    """Redirect the output of this process and its children to the files that `environ` names.

    `EDL_STDOUT` and `EDL_STDERR` name the files; without them the output stays where it is.
    """
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


_ARG_START: Final = 47
"""Field of `/proc/self/stat`, counted from 0: https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html"""


def renew_state() -> None:
    """Renew the state that this process, just forked, would otherwise share with all forks of its parent."""
    _seed_generators()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    importlib.invalidate_caches()  # a folder may have appeared since
    main_thread = threading.main_thread()
    if hasattr(main_thread, "_set_native_id"):  # Python renews it only since 3.13
        main_thread._set_native_id()


def limit_threads(environ: Mapping[str, str]) -> None:
    """Make torch, if it is imported already, use as many threads as if it were imported now with these variables.

    Only OMP_NUM_THREADS matters.
    """
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
    """Make `ps` show other arguments for this process than it was started with.

    This replaces the bytes where the kernel reads them, as setproctitle(3) does. It does nothing if they are not as
    expected or the new arguments are longer.
    """
    before = Path("/proc/self/cmdline").read_bytes()
    begin = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[_ARG_START - 2])
    name, separator, rest = before.partition(b"\0")
    wanted = b"".join(os.fsencode(argument) + b"\0" for argument in arguments)
    if not begin or len(wanted) > len(rest) or ctypes.string_at(begin, len(before)) != before:
        return
    ctypes.memmove(begin + len(name + separator), wanted.ljust(len(rest), b"\0"), len(rest))


@contextmanager
def undo_side_effects() -> Iterator[None]:
    """Restore the environment, warning filters and folder for temporary files after the block.

    Use it for imports that a script would make later, after it may have set what they depend on.
    """
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


_CANNOT_OPEN = 2
"""Exit code of an interpreter that cannot read its script."""
_interrupted = False


def arm_interruption() -> None:
    """Make this process end by SIGINT if an interrupt (Ctrl-C) ended its script, as an interpreter does.

    Call this before anything else registers a function with `atexit`: functions registered later run earlier.
    """
    atexit.register(_end_by_sigint)


def run_main(kind: str, target: str, arguments: Sequence[str]) -> None:
    """Run a program as `__main__`. Returns when it has ended without an error.

    Args:
        kind: `script` (a file, or a folder or archive with a `__main__.py`) or `module` (as for `python -m`).
        target: The script's path or the module's name.
        arguments: What follows the target in `sys.argv`.

    Raises:
        SystemExit: The program raised it, or another exception, which was reported as an interpreter would.
    """
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
    except SystemExit:
        raise
    except BaseException as exc:  # noqa: BLE001 - as the interpreter does: reported, and the exit code is 1
        failure = exc
    if failure is not None:  # outside the block above, so that no exception is being handled during the report
        _end_by_exception(failure)


def command_line(kind: str, target: str, arguments: Sequence[str]) -> list[str]:
    """Return what follows the interpreter on the command line of a worker that torchrun starts."""
    return [*(["-u", "-m"] if kind == "module" else ["-u"]), target, *arguments]


def absolute_path(target: str) -> str:
    """Make a script's path absolute and change nothing else in it, as the interpreter does."""
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
    """Save the exception where torchrun's users look for it, report it as the interpreter does, and exit with 1."""
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
        sys.stderr.write(f"{what}: a consequence; that rank's output or the agent's says what the cause was\n")
    # If the agent finds no other cause, it shows this traceback.
    if not (lost_contact and _is_usual_hook(sys.excepthook)):
        _call_excepthook(exc)
    raise SystemExit(1)


def _is_usual_hook(hook: Any) -> bool:
    """Return whether an exception hook is the interpreter's, rather than the script's or an error reporter's.

    `torch.distributed.init_process_group` wraps the hook in one that starts each line with the rank.
    """
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
    """Report an exception through `sys.excepthook`, which scripts and libraries replace."""
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
