"""The real vLLM behind a gateway, beside `edl serve --hf` on the same weights: one service, three oracles.

One vLLM serves all tests of this file, since it takes a minute to start; the last one kills it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from edl.discovery import open_registry
from edl.distill import DistillReader, Options, Scorer
from edl.distill.compress import TopK
from edl.protocol import names
from edl.testing import LocalTeacher
from tests.fast.serving.gateway.conftest import Gateways, ask
from tests.plugins_vllm import MODEL, VllmServer
from tests.waiting import wait_until

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(1200)
K = 64
VOCABULARY = 2000


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    started = Gateways(tmp_path_factory.mktemp("gateways"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def endpoint(vllm: VllmServer, gateways: Gateways) -> str:
    address = f"vllm://127.0.0.1:{vllm.port}"
    return gateways.start(address, "--top-k", str(K), "--tokenizer", str(MODEL), "--failures", "2")[1]


@pytest.fixture(scope="module")
def teachers(gateways: Gateways, vllm: VllmServer) -> Iterator[dict[str, LocalTeacher]]:
    """`edl serve --hf` of the same service: in buckets and packed."""
    serve: dict[str, Any] = {"hf": str(MODEL), "task": "causal-lm", "top-k": K, "threads": 1, "dtype": "float32"}
    serve |= {"model-version": "r1", "max-tokens": 2048, "device": "cpu"}
    packings = {"bucketed": {}, "packed": {"packing": True}}
    started = {
        name: LocalTeacher("", service="m", discovery=gateways.url, serve={**serve, **more}, wait=False)
        for name, more in packings.items()
    }
    for teacher in started.values():
        teacher.wait_ready(300)
    yield started
    for teacher in started.values():
        teacher.close()


@pytest.fixture(scope="module")
def oracle(vllm: VllmServer) -> Any:
    """Log-probabilities by transformers in this process, float64 [tokens, vocabulary]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()

    def predict(tokens: Sequence[int]) -> np.ndarray:
        with torch.inference_mode():
            return model(torch.tensor([list(tokens)])).logits[0].double().log_softmax(-1).numpy()

    return predict


def sequences_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    chance = np.random.default_rng(seed)
    return [chance.integers(0, VOCABULARY, length).tolist() for length in lengths]


def check(labels: TopK, expected: np.ndarray) -> None:
    """Ids, log-probabilities and tail are right to 1e-4; ids of values that are closer may differ."""
    k = labels.ids.shape[-1]
    values = np.asarray(labels.values, np.float64)
    best = np.argsort(-expected, axis=-1, kind="stable")[:, : k + 1]
    ordered = np.take_along_axis(expected, best, -1)
    np.testing.assert_allclose(values, ordered[:, :k], rtol=0, atol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(expected, labels.ids.astype(np.int64), -1), values, rtol=0, atol=1e-4)
    apart = np.pad(-np.diff(ordered, axis=-1) > 2e-4, ((0, 0), (1, 0)), constant_values=True)
    clear = apart[:, :k] & apart[:, 1:]
    assert (labels.ids == best[:, :k])[clear].all()
    assert clear.mean() > 0.5, "most ids are compared"
    rest = expected.copy()
    np.put_along_axis(rest, labels.ids.astype(np.int64), -np.inf, -1)
    np.testing.assert_allclose(labels.tail_lse, np.log(np.exp(rest).sum(-1)), rtol=0, atol=1e-4)


def test_three_agree(endpoint: str, teachers: dict[str, LocalTeacher], oracle: Any) -> None:
    """A real vLLM behind the gateway, --hf in buckets and packed, and transformers: together, and one by one."""
    found = sequences_of(1, 2, 17, 100, 63, 510, 128)
    expected = np.concatenate([oracle(tokens) for tokens in found])
    targets = {"vllm": endpoint, **{name: teacher.endpoint for name, teacher in teachers.items()}}
    for name, target in targets.items():
        together = ask(target, found, K)
        check(TopK(*together), expected)
        single = [ask(target, [tokens], K) for tokens in (found[2], found[3])]
        for tokens, answer in zip((found[2], found[3]), single, strict=True):
            check(TopK(*answer), oracle(tokens))
        check(TopK(*ask(target, found[:3], 1)), np.concatenate([oracle(tokens) for tokens in found[:3]]))
        with Scorer(target, top_k=K, targets=True) as scorer:
            own = [[*tokens[1:], 5] for tokens in found]
            wanted = [np.array(part)[:, None] for part in own]
            for tokens, part, (labels, values) in zip(
                found, wanted, scorer.score(found, targets=wanted).result(300), strict=True
            ):
                check(labels, oracle(tokens))
                right = np.take_along_axis(oracle(tokens), part, -1)
                np.testing.assert_allclose(values, right, rtol=0, atol=1e-4, err_msg=name)


def test_what_is_refused(vllm: VllmServer, gateways: Gateways, endpoint: str) -> None:
    refused = gateways.launch(f"vllm://127.0.0.1:{vllm.port}", "--top-k", "101")
    assert refused.wait(120) == 2
    assert "--max-logprobs 101" in gateways.log
    for wrong, parameters, words in (
        ([[VOCABULARY]], {}, "out of vocabulary"),
        ([[5] * 511], {}, "510"),
        ([[5]], {names.TEMPERATURE: 0.5}, "temperature 1"),
    ):
        with pytest.raises(InferenceServerException, match=words):
            ask(endpoint, wrong, K, **parameters)


def test_vllm_is_killed(
    vllm: VllmServer, endpoint: str, teachers: dict[str, LocalTeacher], gateways: Gateways, oracle: Any
) -> None:
    """Each token once, at its place, with a label to 1e-4, from whichever kind of teacher."""
    found = sequences_of(*np.random.default_rng(2).integers(1, 60, 150).tolist(), seed=5)
    options = Options(teacher_timeout_s=120)
    reader = DistillReader(["ids", None], ["logprobs"], top_k=K, teacher_batch_size=128, options=options)
    reader.set_dynamic_teacher(gateways.url, "m")
    reader.set_sequence_generator(lambda: ((np.array(ids, np.int32), number) for number, ids in enumerate(found)))
    with reader:
        epoch = reader()
        delivered = list(itertools.islice(epoch, 30))
        wait_until(lambda: sum(teacher.rows > 0 for teacher in reader.stats().teachers.values()) >= 2)
        vllm.kill()
        delivered += epoch
        stats = reader.stats()
    assert [number for _, number, _ in delivered] == list(range(150))
    assert stats.rows_delivered == sum(map(len, found))
    for ids, number, labels in delivered:
        assert ids.tolist() == found[number]
        check(labels, oracle(found[number]))
    with open_registry(gateways.url) as registry:
        wait_until(lambda: endpoint not in {found.endpoint for found in registry.snapshot("m").instances})
    with pytest.raises(InferenceServerException) as away:
        ask(endpoint, [[1, 2, 3]], 20)
    assert away.value.status() == "StatusCode.UNAVAILABLE"
