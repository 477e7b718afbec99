"""Addresses and options of `edl register vllm://…`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edl.errors import SettingsError
from edl_serving.gateway.address import EngineAddress, names_engine
from edl_serving.gateway.config import GatewayConfig
from edl_serving.gateway.engine import EngineAccess

GIVEN = {"model": "m", "model_version": "r1", "discovery": "none"}


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("vllm://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("sglang://host.example:30000/", "http://host.example:30000"),
        ("vllm+https://[::1]:8000", "https://[::1]:8000"),
    ],
)
def test_addresses(text: str, url: str) -> None:
    assert names_engine(text)
    assert EngineAddress.parse(text).base_url == url
    assert str(EngineAddress.parse(text)) == text.rstrip("/")


@pytest.mark.parametrize(
    "text",
    [
        "vllm://",
        "vllm://host",
        "vllm://host:0",
        "vllm://host:70000",
        "vllm://a@b:1",
        "vllm+http://h:1",
        "vllm://h:1/v1",
    ],
)
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="vllm://host:port"):
        EngineAddress.parse(text)


def test_defaults() -> None:
    assert not names_engine("127.0.0.1:8001")
    assert not names_engine("unix:/run/vllm://")
    config = GatewayConfig.of("vllm://127.0.0.1:8000", GIVEN)
    assert (config.top_k, config.engine_model, config.exact_model) == (64, "m", False)
    # Two batches are in flight, and more than those may wait.
    assert (config.server.max_batch_rows, config.server.max_queue_rows) == (8192, 32768)
    config = GatewayConfig.of("vllm://127.0.0.1:8000", {**GIVEN, "max_tokens": 1000, "max_queue": 5000})
    assert (config.server.max_batch_rows, config.server.max_queue_rows) == (500, 5000)


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
