"""Keras: the loss is that of PyTorch, soft labels stay with their rows, and what cannot work is refused."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="Keras is not installed")
torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from edl.collective.keras import ElasticCallback, ElasticDataset  # noqa: E402
from edl.distill.keras import DistillationAccuracy, DistillationLoss, SoftLabelDataset  # noqa: E402
from edl.distill.losses import DistillLoss  # noqa: E402
from edl.errors import SettingsError  # noqa: E402
from edl.testing.models import fingerprint_of  # noqa: E402
from tests.fast.distill.conftest import Serve  # noqa: E402

RANDOM = np.random.default_rng(0)
STUDENT, TEACHER = RANDOM.normal(size=(2, 6, 10)).astype(np.float32) * 3
CLASSES = np.array([3, 1, 4, 1, 5, 9])
PACKED = np.concatenate([TEACHER, CLASSES[:, None]], axis=1).astype(np.float32)


def test_loss_is_that_of_pytorch() -> None:
    student, teacher, classes = torch.from_numpy(STUDENT), torch.from_numpy(TEACHER), torch.from_numpy(CLASSES)
    loss = DistillationLoss(temperature=2.0, alpha=0.7)
    torch.testing.assert_close(loss(PACKED, student), DistillLoss(2.0, 0.7)(student, teacher, classes))
    hard = torch.nn.functional.cross_entropy(student, classes)
    for targets in (CLASSES, CLASSES[:, None]):  # of validation data
        torch.testing.assert_close(loss(targets, student), hard)
    assert keras.losses.deserialize(keras.losses.serialize(loss)).get_config() == loss.get_config()


@pytest.mark.parametrize("targets", [PACKED, CLASSES, CLASSES[:, None]])
def test_accuracy_of_any_targets(targets: np.ndarray) -> None:
    metric = DistillationAccuracy()
    metric.update_state(targets, torch.from_numpy(STUDENT))
    assert np.isclose(float(metric.result()), (STUDENT.argmax(1) == CLASSES).mean())


def test_other_classes_are_refused() -> None:
    with pytest.raises(SettingsError, match="teachers have as many classes as the model"):
        DistillationLoss()(PACKED, torch.zeros(6, 12))


def test_labels_stay_with_their_rows(serve: Serve) -> None:
    """In each epoch, in whichever order `fit` asks; an epoch that was left begins anew."""
    rows = RANDOM.random((22, 4)).astype(np.float32)
    elastic = ElasticDataset(rows, np.arange(22), global_batch=5, seed=3)
    with SoftLabelDataset(elastic, serve("fingerprint").endpoint, inputs="x", outputs="y") as dataset:
        for number in range(3):
            dataset.on_epoch_begin()
            found = [dataset[index] for index in reversed(range(len(dataset) if number else 1))]
            dataset.on_epoch_end()
    assert [len(x) for x, _ in found] == [5, 5, 5, 5, 2]
    x, y = (np.concatenate(parts) for parts in zip(*found, strict=True))
    numbers = y[:, -1].astype(int)
    assert sorted(numbers) == list(range(22))
    np.testing.assert_array_equal(x, rows[numbers])
    np.testing.assert_array_equal(y[:, :-1], fingerprint_of(x))


@pytest.mark.parametrize(("asked", "found"), [({"top_k": 2}, "TopK"), ({"teachers": []}, "NoneType")])
def test_only_logits_are_taken(serve: Serve, asked: dict[str, Any], found: str) -> None:
    elastic = ElasticDataset(RANDOM.random((6, 4), np.float32), np.arange(6), global_batch=3)
    settings = {"teachers": serve("fingerprint").endpoint, "inputs": "x", "outputs": "y", **asked}
    with SoftLabelDataset(elastic, **settings) as dataset:
        dataset.on_epoch_begin()
        with pytest.raises(SettingsError, match=f"teachers' labels {found}: expected"):
            dataset[0]


def test_another_dataset_is_refused() -> None:
    with pytest.raises(SettingsError, match="expected an ElasticDataset"):
        ElasticCallback(RANDOM)
