"""Soft labels for Keras 3: a `PyDataset` that adds them to the targets, and a loss and a metric for such targets.

Keras passes one array of targets to a loss. So a batch's targets become [rows, classes + 1]: the teachers' logits, with
the true class in the last column. The loss and the metric also accept plain classes, as in validation data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from edl.distill.compress import check_temperature
from edl.distill.divergences import check_alpha
from edl.distill.loader import DistillLoader, TeachersLike, batch_request
from edl.errors import SettingsError
from edl.protocol.tensors import Array

__all__ = ["DistillationAccuracy", "DistillationLoss", "SoftLabelDataset"]


class SoftLabelDataset(keras.utils.PyDataset):  # type: ignore[misc]
    """Adds the teachers' logits to the targets of another `PyDataset`, for `DistillationLoss`.

    ::

        with SoftLabelDataset(images, "digits", inputs="image", outputs="logits") as dataset:
            model.compile("adam", DistillationLoss(temperature=4.0, alpha=0.9), metrics=[DistillationAccuracy()])
            model.fit(dataset, epochs=10, validation_data=(test_images, test_labels))

    EDL reads batches ahead of training, in the dataset's own order; the `shuffle` argument of `fit` has no effect.
    Shuffle in the dataset's `on_epoch_end`.

    Args:
        dataset: Yields `(x, y)`, or `(x, y, sample weights)`: `x` is an array [rows, ...] or a dict of such arrays, and
            `y` holds true classes [rows] or [rows, 1].
        teachers: A service's name, `host:port` of teachers, or `Teachers`; None to read the environment.
        inputs: Name of the teachers' input that receives `x`; or a mapping from names to functions of a batch `(x, y)`.
        outputs: Name of the teachers' output that contains logits [rows, classes].
        **arguments: Other arguments of `edl.distill.torch.distill`, such as `cache`, `ids` or `options`. `device`,
            `ahead`, `top_k` and `tokens` are not supported.

    Raises:
        SettingsError: An argument is invalid.
    """

    def __init__(self, dataset: Any, teachers: TeachersLike = None, *, inputs: Any, outputs: str, **arguments: Any):
        super().__init__(workers=1)  # batches are taken in order, from one thread
        self.dataset = dataset
        self._loader = _ArrayLoader(dataset, batch_request(teachers, inputs=inputs, outputs=outputs, **arguments))
        self._labelled: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Return the next batch of the epoch, whatever `index` is."""
        if self._labelled is None:
            self._labelled = self._loader.label(self.dataset[number] for number in range(len(self.dataset)))
        (x, y, *weights), logits = next(self._labelled)
        classes = np.asarray(y).reshape(len(y), -1)
        found = list(logits.shape) if isinstance(logits, np.ndarray) else type(logits).__name__
        if classes.shape[1] != 1 or not isinstance(logits, np.ndarray) or logits.ndim != 2:
            raise SettingsError(
                f"targets are {list(np.shape(y))} and the teachers' labels {found}: expected true classes [rows], and "
                "logits [rows, classes]"
            )
        return x, np.concatenate([logits.astype(np.float32), classes.astype(np.float32)], axis=1), *weights

    def on_epoch_begin(self) -> None:
        """Begin the dataset's next epoch."""
        self._stop()
        self.dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """End the dataset's epoch."""
        self._stop()
        self.dataset.on_epoch_end()

    def _stop(self) -> None:
        if self._labelled is not None:
            self._labelled.close()  # type: ignore[attr-defined]
        self._labelled = None

    def close(self) -> None:
        """End all connections to teachers."""
        self._stop()
        self._loader.close()

    def __enter__(self) -> SoftLabelDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _ArrayLoader(DistillLoader[Any]):
    def to_tensor(self, labels: Array) -> Array:
        return labels

    def move(self, value: Any, device: Any) -> Any:
        return value


def _unpack(y_true: Any, y_pred: Any) -> tuple[Any, Any]:
    """Return the true classes [rows], and the teachers' logits or None."""
    packed = len(y_true.shape) == len(y_pred.shape) and y_true.shape[-1] == y_pred.shape[-1] + 1
    if not packed and len(y_true.shape) == len(y_pred.shape) and y_true.shape[-1] != 1:
        raise SettingsError(
            f"targets are {list(y_true.shape)}, and the model's logits {list(y_pred.shape)}: expected true classes, or "
            "the targets of a SoftLabelDataset whose teachers have as many classes as the model"
        )
    classes = ops.cast(y_true[..., -1] if packed or len(y_true.shape) > 1 else y_true, "int32")
    return classes, y_true[..., :-1] if packed else None


@keras.saving.register_keras_serializable("edl")
class DistillationLoss(keras.losses.Loss):  # type: ignore[misc]
    """Mixes the divergence from the teachers with the cross-entropy against the true classes (Hinton et al., 2015).

    The loss is the mean over the rows of alpha * T² * KL(teacher || student) + (1 - alpha) * cross-entropy, where the
    divergence is computed at temperature T. For targets without teachers' logits, such as validation data, it is only
    the cross-entropy.

    Args:
        temperature: Temperature T, above 0.
        alpha: Share of the divergence, from 0 to 1.
        name: Name of the loss.
        **arguments: Other arguments of `keras.losses.Loss`.

    Raises:
        SettingsError: A value is out of range.
    """

    def __init__(self, temperature: float = 4.0, alpha: float = 0.9, name: str = "distillation_loss", **arguments: Any):
        super().__init__(name=name, **arguments)
        check_temperature(temperature)
        check_alpha(alpha)
        self.temperature = temperature
        self.alpha = alpha

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Return the loss of each row.

        Args:
            y_true: Targets of a `SoftLabelDataset` [rows, classes + 1], or true classes [rows] or [rows, 1].
            y_pred: Logits of the student [rows, classes].
        """
        classes, logits = _unpack(y_true, y_pred)
        hard = keras.losses.sparse_categorical_crossentropy(classes, y_pred, from_logits=True)
        if logits is None:
            return hard
        teacher = ops.log_softmax(logits / self.temperature)
        student = ops.log_softmax(y_pred / self.temperature)
        soft = ops.sum(ops.exp(teacher) * (teacher - student), axis=-1) * self.temperature**2
        return self.alpha * soft + (1 - self.alpha) * hard

    def get_config(self) -> dict[str, Any]:
        """Return the settings, for a saved model."""
        return {**super().get_config(), "temperature": self.temperature, "alpha": self.alpha}


@keras.saving.register_keras_serializable("edl")
class DistillationAccuracy(keras.metrics.SparseCategoricalAccuracy):  # type: ignore[misc]
    """Computes the accuracy for targets with or without soft labels. Keras' own metric would use the wrong column.

    Args:
        name: Name of the metric.
        **arguments: Other arguments of `keras.metrics.SparseCategoricalAccuracy`.
    """

    def __init__(self, name: str = "accuracy", **arguments: Any):
        super().__init__(name=name, **arguments)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count a batch.

        Args:
            y_true: Targets in the forms that `DistillationLoss` accepts.
            y_pred: Logits of the student [rows, classes].
            sample_weight: Weights of the rows, or None.
        """
        super().update_state(_unpack(y_true, y_pred)[0], y_pred, sample_weight)
