"""Programs as forks of a process that has imported already what all of them need, which takes seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

# Forks a process for each line of standard input, and prints its exit status.
SERVER = """
import atexit, json, os, sys, threading, warnings

for line in iter(sys.stdin.readline, ""):
    child = os.fork()
    if child == 0:
        told = json.loads(line)
        output = os.open(told["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number, target in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
            os.dup2(target, number)
        os.chdir(told["folder"])
        os.environ.clear()
        os.environ.update(told["environ"])
        warnings.filterwarnings("error", category=DeprecationWarning, module="__main__")
        exec(compile(told["program"], "<string>", "exec"), {"__name__": "__main__"})
        # As Python ends, but for what was imported, which takes seconds to be forgotten.
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Forks:
    """Runs one program at a time; `imports` is what is done before the first.

    A program that hangs is ended with this one's own test, by its timeout.
    """

    def __init__(self, imports: str) -> None:
        line = [sys.executable, "-W", "error::ResourceWarning", "-c", imports + SERVER]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        root = Path(__file__).parents[2]
        # In a session of its own: Ctrl-C is for the tests.
        self._process = subprocess.Popen(
            line,
            cwd=root,
            env=environ,
            start_new_session=True,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, program: str, folder: Path, output: Path, environ: Mapping[str, str]) -> None:
        """Run a program as `python -c` does.

        Raises:
            AssertionError: it ended with another status than 0.
        """
        told = {"program": program, "folder": str(folder), "output": str(output), "environ": dict(environ)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        status = self._process.stdout.readline()
        assert status == "0\n", f"{program}: {status}\n{output.read_text(errors='replace')}"

    def close(self) -> None:
        """End the process, and whatever program runs."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
