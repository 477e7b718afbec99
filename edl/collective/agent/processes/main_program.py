"""Runs a script or module in a forked process as a new interpreter runs it: its `__main__`, its exceptions, its end.

What does not belong here: what else a fork has inherited (`edl.collective.agent.processes.forked_state`).
"""

from __future__ import annotations

import atexit
import json
import os
import pkgutil
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn, cast

__all__ = ["absolute_path", "arm_interruption", "command_line", "run_main"]

_CANNOT_OPEN = 2
"""Exit code of an interpreter that cannot read its script."""
_interrupted = False


def arm_interruption() -> None:
    """Have a process whose script an interrupt (Ctrl-C) ended end by SIGINT, as an interpreter does.

    Call it before anything else registers a function with `atexit`: those are called before.
    """
    atexit.register(_end_by_sigint)


def run_main(kind: str, target: str, arguments: Sequence[str]) -> None:
    """Run a program as `__main__`. Returns when it has ended well.

    Args:
        kind: `script` (a file, or a folder or archive with a `__main__.py`) or `module` (as `python -m`).
        target: the script's path or the module's name.
        arguments: what follows the target in `sys.argv`.

    Raises:
        SystemExit: the program raised it, or another exception, which has been reported as an interpreter does.
    """
    sys.argv = [target, *arguments]
    sys.orig_argv = [*sys.orig_argv[:1], *command_line(kind, target, arguments)]
    program = sys.modules["__main__"].__dict__
    for name in [name for name in program if not name.startswith("__")]:
        del program[name]  # the command's own, by which this process was started
    failure: BaseException | None = None
    try:
        if kind == "module":
            _run_module(target, alter_argv=True)
        elif pkgutil.get_importer(target) is not None:
            _run_module("__main__", alter_argv=False)  # a folder or an archive, which is in `sys.path` already
        else:
            _run_file(absolute_path(target), program)
    except SystemExit:
        raise
    except BaseException as exc:  # noqa: BLE001 - as the interpreter does: reported, and the exit code is 1
        failure = exc
    if failure is not None:  # not in the block above: nothing is being handled while the interpreter reports
        _end_by_exception(failure)


def command_line(kind: str, target: str, arguments: Sequence[str]) -> list[str]:
    """Return what follows the interpreter in the command line of a worker that torchrun starts.

    Args:
        kind: `script` or `module`.
        target: the script's path or the module's name.
        arguments: of the program.
    """
    return [*(["-u", "-m"] if kind == "module" else ["-u"]), target, *arguments]


def absolute_path(target: str) -> str:
    """Make a script's path absolute and leave it otherwise as it was given, as the interpreter does."""
    return os.path.join(Path.cwd(), target)  # noqa: PTH118 - a `Path` would leave out a `.` inside


def _run_module(name: str, *, alter_argv: bool) -> None:
    # What the interpreter itself calls for `-m`, and for folders and archives (`pymain_run_module` of CPython).
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
    except Exception as exc:  # noqa: BLE001 - raised again. Of a syntax error, for one, no interpreter shows frames
        raise exc.with_traceback(None) from None
    exec(code, program)  # noqa: S102 - the user's own script, as `python` runs it


def _end_by_exception(exc: BaseException) -> NoReturn:
    """Leave the exception where torchrun's users look for it, report it as the interpreter does, and end with 1."""
    frames = exc.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__package__") == __package__:
        frames = frames.tb_next
    exc = exc.with_traceback(frames)
    if isinstance(exc, KeyboardInterrupt):
        global _interrupted
        _interrupted = True
        if not _is_usual_hook(sys.excepthook):
            _call_excepthook(exc)  # after Ctrl-C the tracebacks of all ranks would be no news
        raise SystemExit(128 + signal.SIGINT)
    text = "".join(traceback.format_exception(type(exc), exc, frames))
    _write_error_file(exc, text)
    with suppress(Exception):
        sys.stdout.flush()
    from edl.collective.agent.health.failures import ExitCause, find_exit_cause

    lost_contact = find_exit_cause(1, text) is ExitCause.PEER_LOST
    if sys.excepthook is sys.__excepthook__ and lost_contact:  # the agent reports the other end
        rank = os.environ.get("RANK", "?")
        sys.stderr.write(f"rank {rank} lost contact with another one ({type(exc).__name__})\n")
    else:
        _call_excepthook(exc)
    raise SystemExit(1)


def _is_usual_hook(hook: Any) -> bool:
    """Return whether an exception hook is the interpreter's, and not of the script or a library that reports errors.

    `torch.distributed.init_process_group` puts a hook before it that has lines begin with the rank.
    """
    if hook is sys.__excepthook__:
        return True
    if getattr(hook, "__module__", "") != "torch.distributed.distributed_c10d":
        return False
    return any(_is_usual_hook(cell.cell_contents) for cell in hook.__closure__ or ())


def _write_error_file(exc: BaseException, text: str) -> None:
    """Write what torch's `record` writes, for the agent, where the script does not use `record`."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not Path(path).exists():
        details: dict[str, Any] = {"py_callstack": text, "timestamp": str(int(time.time()))}
        message = {"message": {"message": f"{type(exc).__name__}: {exc}", "extraInfo": details}}
        with suppress(OSError):
            Path(path).write_text(json.dumps(message))


def _call_excepthook(exc: BaseException) -> None:
    """Report an exception by `sys.excepthook`, which scripts and libraries replace."""
    sys.last_type = type(exc)
    sys.last_value = exc
    sys.last_traceback = exc.__traceback__
    sys.last_exc = exc  # type: ignore[attr-defined]  # since Python 3.12
    try:
        sys.excepthook(type(exc), exc, exc.__traceback__)
    except SystemExit:
        raise
    except BaseException as another:  # noqa: BLE001 - reported beside the first, as the interpreter does
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
