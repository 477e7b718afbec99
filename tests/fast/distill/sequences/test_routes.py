"""Sequences of several domains in one source: each token has the label of its domain's teachers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edl.distill import DistillReader, Options, Teachers
from edl.errors import SettingsError
from edl.testing.models import prefix_scores_of
from tests.fast.distill.sequences.corpus import sequences
from tests.fast.distill.sequences.language_model import VOCABULARY, NegativeModel, PrefixModel, check_labels
from tests.fast.serving.conftest import Inside

SIGN = {"math": 1, "code": -1}
PATIENT = Options(teacher_timeout_s=60)


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, str]]:
    models = {"math": Inside(PrefixModel(), max_batch_rows=512), "code": Inside(NegativeModel(), max_batch_rows=512)}
    yield {name: model.target for name, model in models.items()}
    for model in models.values():
        model.close()


def check(ids: Any, domain: str, labels: Any) -> None:
    if domain == "math":
        check_labels(ids, labels, 4)
    else:
        smallest = np.sort(prefix_scores_of(ids, VOCABULARY), axis=1)[:, :4]
        assert labels.values.tolist() == (-smallest).tolist()


def corpus(count: int) -> list[tuple[Any, str]]:
    domains = np.random.default_rng(1).choice(["math", "code"], count, p=[0.9, 0.1])
    return list(zip(sequences(count), map(str, domains), strict=True))


def test_sequences_and_lists(targets: dict[str, str]) -> None:
    found = corpus(300)
    settings: dict[str, Any] = {"teachers": targets, "route": 1, "top_k": 4, "options": PATIENT}
    with DistillReader(["ids", None], ["logprobs"], teacher_batch_size=150, **settings) as reader:
        reader.set_sequence_generator(lambda: iter(found))
        delivered = list(reader())
    with DistillReader(["ids", None], ["logprobs"], **settings) as reader:
        reader.set_sequence_list_generator(lambda: (found[start : start + 9] for start in range(0, 300, 9)))
        delivered += [sample for part in reader() for sample in part]
    assert len(delivered) == 600
    for (ids, domain), (same, _, labels) in zip(found + found, delivered, strict=True):
        assert same is ids
        check(ids, domain, labels)


@pytest.mark.parametrize("batch_rows", [None, 40])
@pytest.mark.parametrize("whole", [None, 1])
def test_padded_batches(targets: dict[str, str], batch_rows: int | None, whole: int | None) -> None:
    torch = pytest.importorskip("torch")
    from edl.distill.torch import distill

    batches = []
    for start in range(0, 120, 8):
        texts = corpus(120)[start : start + 8]
        ids = torch.full((8, 60), 99_999)
        mask = torch.zeros((8, 60), dtype=torch.int64)
        for row, (text, _) in enumerate(texts):
            if row != 3:  # an empty text
                ids[row, : len(text)], mask[row, : len(text)] = torch.from_numpy(text), 1
        batches.append({"input_ids": ids, "attention_mask": mask, "domain": [domain for _, domain in texts]})
    loader = distill(
        batches,
        targets,
        route="domain",
        inputs={"ids": "input_ids"},
        outputs="logprobs",
        tokens="attention_mask",
        top_k=4,
        batch_rows=batch_rows,
        ahead=whole,
        options=PATIENT,
    )
    with loader:
        for _ in range(2):
            delivered = list(loader)
            assert len(delivered) == len(batches)
            for (batch, labels), expected in zip(delivered, batches, strict=True):
                assert batch is expected
                mask = batch["attention_mask"].bool()
                assert not labels.values[~mask].any()
                for row, kept in enumerate(mask):
                    own = labels.map(lambda part, row=row, kept=kept: part[row][kept].numpy())
                    if kept.any():
                        check(batch["input_ids"][row][kept].numpy(), batch["domain"][row], own)
        assert set(loader.stats().routes) == {"math", "code"}


def test_an_empty_batch_waits_for_no_domain(targets: dict[str, str], registry_url: str) -> None:
    """A first batch whose texts are all empty has labels of no rows, of any domain's teachers that are there."""
    pytest.importorskip("torch")
    from edl.distill.torch import distill

    batch = {"ids": np.zeros((2, 3), np.int64), "mask": np.zeros((2, 3)), "domain": ["math", "code"]}
    there = {"law": Teachers(service="nobody", discovery=registry_url), **targets}
    with distill(
        [batch], there, route="domain", inputs={"ids": "ids"}, outputs="logprobs", tokens="mask", top_k=4,
        options=PATIENT,
    ) as loader:  # fmt: skip
        ((_, labels),) = list(loader)
        assert labels.ids.shape == (2, 3, 4)
        assert not labels.values.any()


def test_tokenizers_are_not_mixed(targets: dict[str, str]) -> None:
    """Their ids mean different texts, as within one service."""
    other = Inside(PrefixModel(tokenizer="sha256:cd"), max_batch_rows=512)
    there = {"math": targets["math"], "code": other.target}
    try:
        with DistillReader(["ids", None], ["logprobs"], teachers=there, route=1, top_k=4, options=PATIENT) as reader:
            reader.set_sequence_generator(lambda: iter(corpus(60)))
            with pytest.raises(SettingsError, match=r"the teachers of '.*' do not go together: .* tokenizer 'sha256:"):
                list(reader())
    finally:
        other.close()


def test_batches_read_ahead_do_not_linger(targets: dict[str, str]) -> None:
    """A batch that is asked for as it is read goes out whole, with a request for each domain."""
    pytest.importorskip("torch")
    from edl.distill.torch import distill

    mask = np.array([[1, 1, 1], [1, 1, 0]])
    batch = {"input_ids": np.array([[5, 3, 9], [7, 1, 0]]), "mask": mask, "domain": ["math", "code"]}
    options = Options(teacher_timeout_s=60, linger_s=30.0)
    with distill(
        [batch], targets, route="domain", inputs={"ids": "input_ids"}, outputs="logprobs", tokens="mask", top_k=4,
        ahead=0, options=options,
    ) as loader:  # fmt: skip
        begin = time.monotonic()
        assert len(list(loader)) == 1
        assert time.monotonic() - begin < 30


def test_batches_of_rows_as_tensors() -> None:
    """Domains as numbers in a tensor; the labels of a batch are one tensor."""
    torch = pytest.importorskip("torch")
    from edl.distill.torch import distill
    from edl.testing import LocalTeacher

    data = [(torch.full((6, 4), float(at)), torch.tensor([0, 1, 1, 0, 1, 0])) for at in range(20)]
    with LocalTeacher("echo") as one, LocalTeacher("echo", scale=-1.0) as two:
        there = {0: one.endpoint, 1: two.endpoint}
        with distill(data, there, route=1, inputs={"x": 0}, outputs="y", options=PATIENT) as loader:
            for (x, domain), y in loader:
                assert torch.equal(y, x * (1 - 2 * domain[:, None]))
