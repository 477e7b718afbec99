"""A service with both kinds of teacher, while they are killed, drained and join: each token once, with its label."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options
from edl.testing import LocalTeacher
from tests.fast.distill.conftest import until
from tests.fast.gateway.formula_engine import FormulaEngine
from tests.fast.gateway.gateways import Gateways

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.fast.backends.hf import checkpoints  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

K = 6


@pytest.fixture(scope="module")
def model() -> Any:
    return checkpoints.llama().eval()


@pytest.fixture(scope="module")
def predict(model: Any) -> Iterator[Any]:
    """Log-probabilities by transformers in this process, float64 [tokens, vocabulary]."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them wait for one another where teachers have the cores

    def found(tokens: Sequence[int]) -> np.ndarray:
        with torch.inference_mode():
            return model(torch.tensor([list(tokens)])).logits[0].double().log_softmax(-1).numpy()

    yield found
    torch.set_num_threads(threads)


@pytest.fixture
def engines(predict: Any) -> Iterator[list[FormulaEngine]]:
    """Stand-ins for two vLLMs with the same weights as `edl serve --hf`."""
    started = [FormulaEngine(predict=predict, vocabulary=checkpoints.VOCABULARY) for _ in range(2)]
    yield started
    for engine in started:
        engine.close()


@pytest.fixture
def start(model: Any, tmp_path: Path, gateways: Gateways) -> Iterator[Any]:
    """Starts `edl serve --hf`."""
    model.save_pretrained(tmp_path / "llama")
    serve: dict[str, Any] = {"hf": str(tmp_path / "llama"), "task": "causal-lm", "top-k": K, "max-tokens": 256}
    serve |= {"dtype": "float32", "device": "cpu", "threads": 1, "model-version": "r1"}
    started: list[LocalTeacher] = []

    def start_() -> LocalTeacher:
        started.append(LocalTeacher("", service="m", discovery=gateways.url, serve=serve, wait=False))
        return started[-1]

    yield start_
    for teacher in started:
        teacher.close()


def test_teachers_die_leave_and_join(
    start: Any, gateways: Gateways, engines: list[FormulaEngine], predict: Any
) -> None:
    chance = np.random.default_rng(0)
    found = [chance.integers(0, checkpoints.VOCABULARY, length) for length in chance.integers(1, 60, 700)]
    served = [start(), start()]
    first = f"vllm://127.0.0.1:{engines[0].port}"
    killed, _ = gateways.start(first, "--top-k", str(K), "--failures", "2")
    for teacher in served:
        teacher.wait_ready(300)
    gateways.wait_instances(3)
    reader = DistillReader(
        ["ids", None], ["logprobs"], top_k=K, teacher_batch_size=100, options=Options(teacher_timeout_s=120)
    )
    reader.set_dynamic_teacher(gateways.url, "m")
    reader.set_sequence_generator(lambda: ((ids.astype(np.int32), number) for number, ids in enumerate(found)))
    with reader:
        epoch = reader()

        def live() -> int:
            return reader.stats().teachers_live

        delivered = list(itertools.islice(epoch, 100))
        until(lambda: live() == 3, 120)
        served[0].kill()
        joining = start()
        delivered += itertools.islice(epoch, 100)
        killed.kill()
        drained, _ = gateways.start(f"vllm://127.0.0.1:{engines[1].port}", "--top-k", str(K), "--failures", "2")
        joining.wait_ready(300)
        until(lambda: live() == 3, 120)
        delivered += itertools.islice(epoch, 100)
        engines[1].failure = lambda path, number: "close" if number % 3 else None  # an engine that is being killed
        delivered += itertools.islice(epoch, 100)
        engines[1].failure = None
        served[1].terminate()
        delivered += itertools.islice(epoch, 100)
        drained.send_signal(signal.SIGTERM)
        delivered += epoch
        stats = reader.stats()
    assert drained.wait(60) == 0, gateways.log
    assert [number for _, number, _ in delivered] == list(range(len(found)))
    assert stats.rows_delivered == sum(map(len, found)), "rows are tokens"
    for engine in engines:
        asked = sum(len(body["token_ids"]) for _, body in engine.requests)
        assert asked > 100, "both kinds label, beyond the questions at the start"
    for ids, number, labels in delivered:
        assert ids.tolist() == found[number].tolist()
        expected = predict(found[number])
        ordered = -np.sort(-expected, -1)[:, :K]
        np.testing.assert_allclose(labels.values, ordered, rtol=0, atol=1e-4, err_msg=f"sequence {number}")
        picked = np.take_along_axis(expected, labels.ids.astype(np.int64), -1)
        np.testing.assert_allclose(picked, ordered, rtol=0, atol=1e-4, err_msg=f"sequence {number}")
