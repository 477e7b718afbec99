"""`edl register vllm://…` as a process: before a small engine with a formula, and before the real vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from edl.discovery import open_registry
from edl.protocol import names
from edl.tokenizer_hash import hash_tokenizer
from tests.integration.gateway.formula_engine import FormulaEngine, log_probabilities
from tests.plugins_vllm import MODEL, VllmFactory

SEQUENCES = [[3, 1, 4, 1, 5], [9], [2, 6], list(range(40))]


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
        deadline = time.monotonic() + 120
        while not ready.exists():
            assert process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)
        return process, str(json.loads(ready.read_text())["endpoint"])

    def launch(self, address: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a gateway."""
        command = [sys.executable, "-m", "edl", "register", address, "--model", "m", "--model-version", "r1"]
        command += ["--discovery", self.url, "--ttl", "5s", "--interval", "100ms", "--exit-with", str(os.getpid())]
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
        deadline = time.monotonic() + 60
        with open_registry(self.url) as registry:
            while len(found := registry.snapshot("m").instances) != count:
                assert time.monotonic() < deadline, (found, self.log)
                time.sleep(0.05)
        return found

    def close(self) -> None:
        """Kill what is left."""
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture
def gateways(tmp_path: Path) -> Iterator[Gateways]:
    started = Gateways(tmp_path)
    yield started
    started.close()


@pytest.fixture
def engine() -> Iterator[FormulaEngine]:
    server = FormulaEngine()
    yield server
    server.close()


def ask(
    endpoint: str, sequences: Sequence[Sequence[int]], k: int | None, **parameters: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, values and tails of a request, by Triton's client."""
    ids = np.concatenate([np.asarray(tokens, np.int32) for tokens in sequences])
    position = np.concatenate([np.arange(len(tokens), dtype=np.int32) for tokens in sequences])
    tensors = []
    for name, array in ((names.IDS, ids), (names.POSITION, position)):
        tensors.append(tritonclient.grpc.InferInput(name, array.shape, "INT32"))
        tensors[-1].set_data_from_numpy(array)
    if k is not None:
        parameters[names.TOP_K] = k
    with tritonclient.grpc.InferenceServerClient(endpoint) as client:
        result = client.infer("m", tensors, parameters=parameters, client_timeout=100)
    found = [result.as_numpy(name) for name in names.top_k_names(names.LOGPROBS)]
    return found[0], found[1], found[2]


def test_students_get_rows(engine: FormulaEngine, gateways: Gateways, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    address = f"vllm://127.0.0.1:{engine.port}"
    process, endpoint = gateways.start(address, "--top-k", "8", "--tokenizer", str(tokenizer))
    (instance,) = gateways.wait_instances(1)
    assert instance.meta["version"] == "r1"
    assert instance.meta[names.TOKENIZER_META] == hash_tokenizer(tokenizer)
    ids, values, tail = ask(endpoint, SEQUENCES, 8)
    expected = np.concatenate([log_probabilities(tokens) for tokens in SEQUENCES])
    best = np.argsort(-expected, axis=-1, kind="stable")[:, :8]
    np.testing.assert_array_equal(ids, best)
    np.testing.assert_allclose(values, np.take_along_axis(expected, best, -1), atol=1e-6)
    np.testing.assert_allclose(np.exp(tail) + np.exp(values).sum(-1), 1.0, atol=1e-5)
    with tritonclient.grpc.InferenceServerClient(endpoint) as client:
        parameters = client.get_model_config("m").config.parameters
    shown = {name: parameters[name].string_value for name in (names.SEQUENCES, names.MAX_TOP_K, names.MAX_SEQUENCE)}
    assert list(shown.values()) == ["position", "8", "62"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, gateways.log
    gateways.wait_instances(0)


def test_requests_are_refused(engine: FormulaEngine, gateways: Gateways) -> None:
    _, endpoint = gateways.start(f"vllm://127.0.0.1:{engine.port}", "--top-k", "8")
    wrong: list[tuple[list[list[int]], int | None, dict[str, Any], str]] = [
        (SEQUENCES, 8, {names.TEMPERATURE: 2.0}, "temperature 1"),
        (SEQUENCES, 9, {}, "8 at most"),
        (SEQUENCES, None, {}, names.TOP_K),
        ([[1] * 63], 8, {}, "62"),
        ([[50]], 8, {}, "out of vocabulary"),
    ]
    for sequences, k, parameters, words in wrong:
        with pytest.raises(InferenceServerException, match=words) as refused:
            ask(endpoint, sequences, k, **parameters)
        assert refused.value.status() == "StatusCode.INVALID_ARGUMENT", words


def test_discovery_follows_engine(engine: FormulaEngine, gateways: Gateways) -> None:
    _, endpoint = gateways.start(f"vllm://127.0.0.1:{engine.port}", "--top-k", "8", "--failures", "2")
    gateways.wait_instances(1)
    engine.healthy = False
    gateways.wait_instances(0)
    with pytest.raises(InferenceServerException) as away:
        ask(endpoint, SEQUENCES, 8)
    assert away.value.status() == "StatusCode.UNAVAILABLE"
    engine.healthy = True
    gateways.wait_instances(1)
    assert len(ask(endpoint, SEQUENCES, 8)[0]) == sum(map(len, SEQUENCES))


def test_engine_may_start_later(gateways: Gateways) -> None:
    first = FormulaEngine()
    first.close()
    process = gateways.launch(f"vllm://127.0.0.1:{first.port}", "--top-k", "8")
    deadline = time.monotonic() + 60
    while "waiting for the engine" not in gateways.log:
        assert process.poll() is None, gateways.log
        assert time.monotonic() < deadline, gateways.log
        time.sleep(0.05)
    engine = FormulaEngine(first.port)
    try:
        gateways.wait_instances(1)
    finally:
        engine.close()


def test_unusable_engine_ends_command(engine: FormulaEngine, gateways: Gateways) -> None:
    process = gateways.launch(f"vllm://127.0.0.1:{engine.port}", "--top-k", "64")
    assert process.wait(60) == 2
    assert "--max-logprobs 64" in gateways.log
    gateways.wait_instances(0)


def random_sequences() -> list[list[int]]:
    chance = np.random.default_rng(0)
    return [chance.integers(0, 2000, length).tolist() for length in (1, 2, 17, 100, 63, 510, 128)]


def check_against_transformers(
    answer: tuple[np.ndarray, np.ndarray, np.ndarray], sequences: Sequence[Sequence[int]], k: int
) -> None:
    """Labels are those of transformers in this process, on the same weights, to 1e-4."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    ids, values, tail = (torch.from_numpy(array.copy()) for array in answer)
    at = 0
    for tokens in sequences:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0].double()
        expected = torch.log_softmax(logits, -1)
        rows = slice(at, at + len(tokens))
        at += len(tokens)
        own = expected.gather(-1, ids[rows].long())
        torch.testing.assert_close(values[rows].double(), own, atol=1e-4, rtol=0)
        torch.testing.assert_close(values[rows].double(), expected.topk(k, -1).values, atol=1e-4, rtol=0)
        rest = expected.scatter(-1, ids[rows].long(), -torch.inf).logsumexp(-1)
        torch.testing.assert_close(tail[rows].double(), rest, atol=1e-4, rtol=0)
    assert at == len(ids)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("options", [("--enable-scale-out", "--max-logprobs", "64"), ("--max-logprobs", "-1")])
def test_real_vllm_is_transformers(vllm: VllmFactory, gateways: Gateways, options: tuple[str, ...]) -> None:
    server = vllm.shared(*options)
    tokenizer = ("--tokenizer", str(MODEL))
    _, endpoint = gateways.start(f"vllm://127.0.0.1:{server.port}", "--top-k", "64", *tokenizer)
    path = "/inference/v1/generate" if "--enable-scale-out" in options else "/v1/completions"
    assert f"asked at {path}" in gateways.log
    sequences = random_sequences()
    check_against_transformers(ask(endpoint, sequences, 64), sequences, 64)
    check_against_transformers(ask(endpoint, sequences[:3], 1), sequences[:3], 1)
    for wrong, parameters, words in (
        ([[2000]], {}, "out of vocabulary"),
        ([[5] * 511], {}, "510"),
        ([[5]], {names.TEMPERATURE: 0.5}, "temperature 1"),
    ):
        with pytest.raises(InferenceServerException, match=words):
            ask(endpoint, wrong, 64, **parameters)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_real_vllm_is_killed(vllm: VllmFactory, gateways: Gateways) -> None:
    server = vllm.start("--enable-scale-out")
    address = f"vllm://127.0.0.1:{server.port}"
    refused = gateways.launch(address, "--top-k", "21")
    assert refused.wait(60) == 2
    assert "--max-logprobs 21" in gateways.log
    _, endpoint = gateways.start(address, "--top-k", "20", "--failures", "2")
    assert len(ask(endpoint, [[1, 2, 3]], 20)[0]) == 3
    gateways.wait_instances(1)
    server.kill()
    gateways.wait_instances(0)
    with pytest.raises(InferenceServerException) as away:
        ask(endpoint, [[1, 2, 3]], 20)
    assert away.value.status() == "StatusCode.UNAVAILABLE"
