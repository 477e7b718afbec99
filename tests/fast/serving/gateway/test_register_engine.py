"""`edl register vllm://…` as a process before a small engine with a formula."""

from __future__ import annotations

import json
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from edl.cli import main
from edl.protocol import names
from edl.tokenizer_hash import hash_tokenizer
from tests.fast.serving.gateway.formula_engine import FormulaEngine, log_probabilities
from tests.fast.serving.gateway.gateways import Gateways, ask
from tests.waiting import DEADLINE_S, wait_until

SEQUENCES = [[3, 1, 4, 1, 5], [9], [2, 6], list(range(40))]


def test_students_get_rows(engine: FormulaEngine, gateways: Gateways, tmp_path: Path) -> None:
    """And discovery follows the engine."""
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    address = f"vllm://127.0.0.1:{engine.port}"
    engine.healthy = False
    process = gateways.launch(address, "--top-k", "8", "--tokenizer", str(tokenizer), "--failures", "2")
    wait_until(lambda: "waiting for the engine" in gateways.log)
    engine.healthy = True
    (instance,) = gateways.wait_instances(1)
    assert instance.meta["version"] == "r1"
    assert instance.meta[names.TOKENIZER_META] == hash_tokenizer(tokenizer)
    ids, values, tail = ask(instance.endpoint, SEQUENCES, 8)
    expected = np.concatenate([log_probabilities(tokens) for tokens in SEQUENCES])
    best = np.argsort(-expected, axis=-1, kind="stable")[:, :8]
    np.testing.assert_array_equal(ids, best)
    np.testing.assert_allclose(values, np.take_along_axis(expected, best, -1), atol=1e-6)
    np.testing.assert_allclose(np.exp(tail) + np.exp(values).sum(-1), 1.0, atol=1e-5)
    with tritonclient.grpc.InferenceServerClient(instance.endpoint) as client:
        parameters = client.get_model_config("m").config.parameters
    shown = {name: parameters[name].string_value for name in (names.SEQUENCES, names.MAX_TOP_K, names.MAX_SEQUENCE)}
    assert list(shown.values()) == ["position", "8", "62"]

    wrong: list[tuple[list[list[int]], int | None, dict[str, Any], str]] = [
        (SEQUENCES, 8, {names.TEMPERATURE: 2.0}, "temperature 1"),
        (SEQUENCES, 9, {}, "8 at most"),
        (SEQUENCES, None, {}, names.TOP_K),
        ([[1] * 63], 8, {}, "62"),
        ([[50]], 8, {}, "out of vocabulary"),
    ]
    for sequences, k, more, words in wrong:
        with pytest.raises(InferenceServerException, match=words) as refused:
            ask(instance.endpoint, sequences, k, **more)
        assert refused.value.status() == "StatusCode.INVALID_ARGUMENT", words

    engine.healthy = False
    gateways.wait_instances(0)
    with pytest.raises(InferenceServerException) as away:
        ask(instance.endpoint, SEQUENCES, 8)
    assert away.value.status() == "StatusCode.UNAVAILABLE"
    engine.healthy = True
    gateways.wait_instances(1)
    assert len(ask(instance.endpoint, SEQUENCES, 8)[0]) == sum(map(len, SEQUENCES))
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0, gateways.log
    gateways.wait_instances(0)


def test_tokens_at_the_engine_are_bounded(engine: FormulaEngine, gateways: Gateways, tmp_path: Path) -> None:
    """Whatever students ask for, the engine has `--max-tokens` at a time, and a token behind each sequence."""
    bounds = ("--max-tokens", "80", "--max-queue", "400", "--metrics-port", "0")
    _, endpoint = gateways.start(f"vllm://127.0.0.1:{engine.port}", "--top-k", "8", *bounds)
    port = json.loads((tmp_path / "ready-0").read_text())["metrics_port"]
    engine.released.clear()
    engine.most_tokens = 0
    sequences = [[number] * 20 for number in range(16)]

    def shown(name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as answer:
            lines = answer.read().decode().splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(f'{name}{{model="m"}}')))

    with ThreadPoolExecutor(len(sequences)) as students:
        asked = [students.submit(ask, endpoint, [tokens], 8) for tokens in sequences]
        wait_until(lambda: engine.most_tokens >= 2 * 21 and shown("edl_teacher_queue_rows") >= 160)
        engine.released.set()
        for tokens, future in zip(sequences, asked, strict=True):
            best = np.argsort(-log_probabilities(tokens), axis=-1, kind="stable")[:, :8]
            np.testing.assert_array_equal(future.result(DEADLINE_S)[0], best)
    assert engine.most_tokens <= 4 * 21, "two batches of 40 tokens, each of two sequences"
    assert shown("edl_teacher_rows_total") >= 320


def test_unusable_engine_ends_command(engine: FormulaEngine, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["register", f"vllm://127.0.0.1:{engine.port}", "--model", "m", "--model-version", "r1", "--top-k", "64"]
    assert main([*command, "--discovery", "none"]) == 2
    assert "--max-logprobs 64" in capsys.readouterr().err
