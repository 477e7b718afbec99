"""Gateways as processes, what they answer, and the small engine; ended with the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc

from edl.discovery import open_registry
from edl.protocol import names
from tests.fast.serving.gateway.formula_engine import FormulaEngine
from tests.waiting import DEADLINE_S, wait_until


@pytest.fixture
def gateways(stack: ExitStack, tmp_path: Path) -> Gateways:
    return stack.enter_context(closing(Gateways(tmp_path)))


@pytest.fixture
def engine(stack: ExitStack) -> FormulaEngine:
    return stack.enter_context(closing(FormulaEngine()))


class Gateways:
    """Starts `edl register` and ends it.

    Args:
        folder: for the registry, ready files and logs.
    """

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder}/discovery.sqlite"
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, address: str, *arguments: str) -> tuple[subprocess.Popen[bytes], str]:
        """Start a gateway; return its process and endpoint once students can come."""
        ready = self._folder / f"ready-{len(self._started)}"
        process = self.launch(address, "--ready-file", str(ready), *arguments)
        wait_until(lambda: ready.exists() or process.poll() is not None, "a gateway")
        assert process.poll() is None, self.log
        return process, str(json.loads(ready.read_text())["endpoint"])

    def launch(self, address: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a gateway."""
        command = [sys.executable, "-m", "edl", "register", address, "--model", "m", "--model-version", "r1"]
        command += ["--discovery", self.url, "--ttl", "60s", "--interval", "100ms", "--exit-with", str(os.getpid())]
        with (self._folder / "log").open("ab") as log:
            self._started.append(
                subprocess.Popen([*command, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )
        return self._started[-1]

    @property
    def log(self) -> str:
        """What was printed so far."""
        return (self._folder / "log").read_text()

    def wait_instances(self, count: int) -> Any:
        """Wait until so many instances are in discovery."""
        with open_registry(self.url) as registry:
            wait_until(lambda: len(registry.snapshot("m").instances) == count, f"{count} instances")
            return registry.snapshot("m").instances

    def close(self) -> None:
        """Kill what is left."""
        for process in self._started:
            process.kill()
            process.wait()


def inputs_of(sequences: Sequence[Sequence[int]]) -> dict[str, Any]:
    ids = np.concatenate([np.asarray(tokens, np.int32) for tokens in sequences])
    return {"ids": ids, "position": np.concatenate([np.arange(len(tokens), dtype=np.int32) for tokens in sequences])}


def ask(
    endpoint: str, sequences: Sequence[Sequence[int]], k: int | None, **parameters: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, values and tails of a request, by Triton's client."""
    tensors = []
    for name, array in inputs_of(sequences).items():
        tensors.append(tritonclient.grpc.InferInput(name, array.shape, "INT32"))
        tensors[-1].set_data_from_numpy(array)
    if k is not None:
        parameters[names.TOP_K] = k
    with tritonclient.grpc.InferenceServerClient(endpoint) as client:
        result = client.infer("m", tensors, parameters=parameters, client_timeout=DEADLINE_S)
    found = [result.as_numpy(name) for name in names.top_k_names(names.LOGPROBS)]
    return found[0], found[1], found[2]
