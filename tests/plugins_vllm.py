"""The real vLLM as a fixture: `vllm` is one that serves all tests of a run, the last of which may kill it.

`make tools` (tools/vllm.sh) installs it. Where it is missing, tests that use the fixture are skipped; in CI they fail,
unless there is nothing to install it from (../shared/vllm).
"""

from __future__ import annotations

import contextlib
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins_consul import free_ports
from tests.servers import Server, lack

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")  # before tests have one of their own
_HOME = Path(os.environ.get("EDL_VLLM_HOME") or _CACHE / "edl/vllm")
MODEL = _HOME / "tiny"
"""A random Llama of 2,000 tokens with its tokenizer, as transformers loads it."""
_SOURCE = Path(__file__).resolve().parents[2] / "shared/vllm"


class VllmServer(Server):
    """A vLLM on the small model. `options` are vLLM's, beside those for a small machine."""

    start_s = 900.0  # half a minute on an idle machine, which this one may not be
    own_group = True  # the engine is a process of its own

    def __init__(self, folder: Path, *options: str) -> None:
        (self.port,) = free_ports(1)
        command = [
            *(str(_HOME / "bin/python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)),
            *("--served-model-name", "tiny", "--enforce-eager", "--dtype", "float32", "--max-model-len", "512"),
            *("--gpu-memory-utilization", "0.1", "--host", "127.0.0.1", "--port", str(self.port), *options),
        ]
        environ = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # Threads that wait for one another in a loop take minutes where others need the cores as well.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        super().__init__(folder, command, environ)

    def is_healthy(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
            return True
        return False


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A vLLM that has the endpoint of token ids, and gives up to 100 log-probabilities of a token."""
    if not (_HOME / "complete").exists():
        reason = "the real vLLM is not installed; `make tools` installs it where ../shared/vllm is there"
        if _SOURCE.exists():
            lack(reason)
        pytest.skip(reason)
    with VllmServer(tmp_path_factory.mktemp("vllm"), "--enable-scale-out", "--max-logprobs", "100") as server:
        yield server
