"""Keras: the loss is that of PyTorch, soft labels stay with their rows, and what cannot work is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="Keras is not installed")
torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from edl.collective.checkpoint.memory.slots import SlotPair  # noqa: E402
from edl.collective.keras import ElasticCallback, ElasticDataset  # noqa: E402
from edl.distill.keras import DistillationAccuracy, DistillationLoss, SoftLabelDataset  # noqa: E402
from edl.distill.losses import DistillLoss  # noqa: E402
from edl.errors import SettingsError  # noqa: E402
from edl.testing.models import fingerprint_of  # noqa: E402
from tests.fast.distill.conftest import Serve  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, with numpy 2
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


def test_weights_stay_with_their_rows(serve: Serve) -> None:
    class Weighted(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return RANDOM.random((3, 4), np.float32), np.arange(3), np.full(3, index + 0.5)

    with SoftLabelDataset(Weighted(), serve("fingerprint").endpoint, inputs="x", outputs="y") as dataset:
        dataset.on_epoch_begin()
        assert [dataset[index][2].tolist() for index in (0, 1)] == [[0.5] * 3, [1.5] * 3]


class Stop(keras.callbacks.Callback):
    """Raises before a step, as a worker may die."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left < 0:
            raise InterruptedError


def fit(folder: Path, stop_at: int, **arguments: Any) -> list[Any]:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(10)])
    model.compile(keras.optimizers.Adam(0.5), DistillationLoss())
    dataset = ElasticDataset(np.eye(10, 4, dtype=np.float32), np.arange(10), global_batch=4)  # 3 steps per epoch
    halved = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    elastic = ElasticCallback(dataset, interval_steps=1, slots=SlotPair(folder))
    model.fit(dataset, epochs=3, verbose=0, callbacks=[elastic, halved, Stop(stop_at)], **arguments)
    return [variable.numpy().tolist() for variable in [*model.variables, *model.optimizer.variables]]


@pytest.mark.parametrize("stop_at", [4, 6])
def test_schedule_acts_once_per_epoch(tmp_path: Path, stop_at: int) -> None:
    """Also in an epoch that a restart begins once more, in the middle or after its last step."""
    with pytest.raises(InterruptedError):
        fit(tmp_path / "killed", stop_at)
    assert fit(tmp_path / "killed", 9) == fit(tmp_path / "calm", 9)


def test_parts_of_epochs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="leave out steps_per_epoch"):
        fit(tmp_path, 9, steps_per_epoch=2)
