"""`edl register vllm://…` as a process before a small engine with a formula."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

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
