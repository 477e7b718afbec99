"""`edl register vllm://…`: its options, and as a process before a small engine with a formula."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from edl.errors import SettingsError
from edl.protocol import names
from edl.tokenizer_hash import hash_tokenizer
from edl_serving.gateway.address import EngineAddress, names_engine
from edl_serving.gateway.config import GatewayConfig
from edl_serving.gateway.engine import EngineAccess
from tests.fast.serving.gateway.formula_engine import FormulaEngine, log_probabilities
from tests.fast.serving.gateway.gateways import Gateways, ask
from tests.waiting import DEADLINE_S, wait_until

GIVEN = {"model": "m", "model_version": "r1", "store": "none"}


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("vllm://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("sglang://host.example:30000/", "http://host.example:30000"),
        ("vllm+https://[::1]:8000", "https://[::1]:8000"),
        *(("vllm://", ""), ("vllm://host", ""), ("vllm://host:0", ""), ("vllm://host:70000", "")),
        *(("vllm://a@b:1", ""), ("vllm+http://h:1", ""), ("vllm://h:1/v1", "")),
    ],
)
def test_addresses(text: str, url: str) -> None:
    if url:
        assert names_engine(text)
        assert EngineAddress.parse(text).base_url == url
    else:
        with pytest.raises(SettingsError, match="vllm://host:port"):
            EngineAddress.parse(text)


def test_two_batches_are_in_flight() -> None:
    """And more than those may wait."""
    for given, sizes in (({}, (8192, 32768)), ({"max_tokens": 1000, "max_queue": 5000}, (500, 5000))):
        server = GatewayConfig.of("vllm://127.0.0.1:8000", {**GIVEN, **given}).server
        assert (server.max_batch_rows, server.max_queue_rows) == sizes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": None}, "--model"),
        ({"model_version": None}, "--model-version"),
        ({"engine_ca": "ca.pem"}, r"vllm\+https://"),
        ({"max_tokens": 1}, "--max-tokens"),
        ({"engine_timeout": 0.0}, "--engine-timeout"),
        ({"tokenizer": "/nowhere/at/all"}, "--tokenizer"),
    ],
)
def test_wrong_options_are_refused(change: dict[str, Any], words: str) -> None:
    given = {name: value for name, value in {**GIVEN, **change}.items() if value is not None}
    with pytest.raises(SettingsError, match=words):
        GatewayConfig.of("vllm://127.0.0.1:8000", given)


def test_token_file(tmp_path: Path) -> None:
    address = EngineAddress("vllm", "h", 1)
    path = tmp_path / "key"
    path.write_text(" key \nother\n")
    assert EngineAccess(address, token_file=str(path)).read_token() == "key"
    for content in ("\n", "a\x00b", "\u00e9"):
        path.write_text(content)
        with pytest.raises(SettingsError, match="--engine-token-file"):
            EngineAccess(address, token_file=str(path)).read_token()


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
