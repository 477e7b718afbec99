"""The real vLLM as a fixture: `vllm.start()` gives one, on a free port, that a test may kill.

`make tools` (tools/vllm.sh) installs it. Where it is missing, tests that use the fixture are skipped; in CI they fail,
unless there is nothing to install it from (../shared/vllm).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.plugins_consul import free_ports
from tests.servers import lack

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")  # before tests have one of their own
_HOME = Path(os.environ.get("EDL_VLLM_HOME") or _CACHE / "edl/vllm")
MODEL = _HOME / "tiny"
"""A random Llama of 2,000 tokens with its tokenizer, as transformers loads it."""
PYTHON = _HOME / "bin/python"
"""Of its environment, in which TRL is as well."""
_SOURCE = Path(__file__).resolve().parents[2] / "shared/vllm"
_START_S = 900.0
"""Half a minute on an idle machine, which this one may not be."""


@dataclass
class VllmServer:
    """A running vLLM.

    Attributes:
        port: of HTTP.
    """

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def wait_ready(self) -> None:
        """Wait until it has answered a request, whose first one takes long.

        Raises:
            AssertionError: the process ended, or time is over; with the end of the log.
        """
        deadline = time.monotonic() + _START_S
        while True:
            tail = self.log.read_text(errors="replace")[-3000:]
            assert self.process.poll() is None, f"vLLM ended with code {self.process.returncode}:\n{tail}"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5.0):
                    return
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < deadline, f"vLLM was not ready within {_START_S} s:\n{tail}"
            time.sleep(0.2)

    def kill(self) -> None:
        """SIGKILL to the server and all its processes at once, as a lost machine would look. May be called twice."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(30)


class VllmFactory:
    """Starts vLLM servers on the small model, and stops what is left of them at the end.

    Args:
        folder: for logs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[VllmServer] = []
        self._plain: dict[tuple[str, ...], VllmServer] = {}

    def start(self, *options: str) -> VllmServer:
        """A server of the test's own, which it may kill.

        Args:
            options: of vLLM, beside those for a small machine.
        """
        (port,) = free_ports(1)
        command: Sequence[str] = [
            *(str(_HOME / "bin/python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)),
            *("--served-model-name", "tiny", "--enforce-eager", "--dtype", "float32", "--max-model-len", "512"),
            *("--gpu-memory-utilization", "0.1", "--host", "127.0.0.1", "--port", str(port), *options),
        ]
        log = self._folder / f"vllm-{port}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the engine is a process of its own: both are killed as a group
                env={
                    **os.environ,
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "HF_HUB_OFFLINE": "1",
                    "VLLM_NO_USAGE_STATS": "1",
                    # Threads that wait for one another in a loop take minutes where others need the cores as well.
                    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                    "OMP_NUM_THREADS": "1",
                },
            )
        server = VllmServer(port, process, log)
        self._started.append(server)
        server.wait_ready()
        return server

    def shared(self, *options: str) -> VllmServer:
        """A server for tests that leave it as it is; the same one for the same options."""
        server = self._plain.get(options)
        if server is None or server.process.poll() is not None:
            server = self._plain[options] = self.start(*options)
        return server

    def close(self) -> None:
        """Kill everything that was started."""
        for server in self._started:
            server.kill()


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmFactory]:
    """Starts the real vLLM; see `VllmFactory.start`."""
    if not (_HOME / "complete").exists():
        reason = "the real vLLM is not installed; `make tools` installs it where ../shared/vllm is there"
        if _SOURCE.exists():
            lack(reason)
        pytest.skip(reason)
    factory = VllmFactory(tmp_path_factory.mktemp("vllm"))
    yield factory
    factory.close()
