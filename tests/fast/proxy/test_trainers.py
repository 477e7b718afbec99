"""TRL's own client code before the proxy, where TRL is installed (`pip install trl`; it needs no vLLM)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edl.proxy.server import ProxyServer
from edl.proxy.settings import ProxySettings
from edl.testing.models import prefix_scores_of
from tests.fast.distill.sequences.language_model import VOCABULARY, NegativeModel, PrefixModel
from tests.fast.serving.conftest import Inside

IDS = np.random.default_rng(1).integers(0, VOCABULARY, 20).tolist()
SIGNS = {"math": 1, "code": -1}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    teachers = [Inside(PrefixModel()), Inside(NegativeModel())]
    services = {name: teacher.target for name, teacher in zip(SIGNS, teachers, strict=True)}
    with ProxyServer(ProxySettings(services, port=0)) as proxy:
        yield proxy.url.rstrip("/")
    for teacher in teachers:
        teacher.close()


def best_of(name: str, k: int) -> Any:
    """The k largest log-probabilities that a model gives to each token behind the first, [tokens - 1, k]."""
    scores = SIGNS[name] * prefix_scores_of(np.asarray(IDS, np.int32), VOCABULARY)[:-1]
    return -np.sort(-scores, axis=1)[:, :k]


def test_trl_asynchronous_trainer(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two teachers, by `teacher_id`, at one proxy."""
    pytest.importorskip("trl")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    import aiohttp
    from trl.experimental.async_distillation import async_rollout_worker as worker

    monkeypatch.setattr(worker, "logger", logging.getLogger("trl"))  # its own needs an Accelerator
    loop: Any = object.__new__(worker._AsyncRolloutLoop)
    loop.teacher_server_urls = {name: f"{url}/{name}" for name in SIGNS}
    loop.teacher_model_names, loop.request_timeout = {}, 60
    loop.teacher_temperature, loop.teacher_top_k = 1.0, 4
    loop._stop_event = asyncio.Event()

    async def score() -> None:
        async with aiohttp.ClientSession() as loop.session:
            await loop._resolve_teacher_model_names()
            for name in SIGNS:
                _, where = loop._resolve_teacher_server_url({"teacher_id": name})
                model = loop.teacher_model_names[name]
                ids, values = await loop._score_with_teacher(IDS[:1], IDS[1:], where, model)
                assert [row[:4] for row in values] == best_of(name, 4).tolist()
                assert all(token in row for token, row in zip(IDS[1:], ids, strict=True))

    asyncio.run(score())


def test_trl_client(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of TRL's ServerDistillationTrainer, which asks for an installed vLLM and does not use it here."""
    pytest.importorskip("trl")
    from trl.generation import vllm_client

    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)
    for name in SIGNS:
        client = vllm_client.VLLMClient(base_url=f"{url}/{name}", connection_timeout=60.0)
        assert (client.model, client.get_world_size()) == (name, 1)
        found = client.get_sequence_logprobs([IDS], [1], top_logprobs=4)
        assert found["logprobs"][0] == best_of(name, 4).tolist()
