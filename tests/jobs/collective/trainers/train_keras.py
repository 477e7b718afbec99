"""Keras' `fit` with dropout, batch normalization and soft labels; rank 1 kills itself after step KILL_AT, once."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

from edl.collective.keras import ElasticCallback, ElasticDataset
from edl.distill.keras import DistillationAccuracy, DistillationLoss, SoftLabelDataset

FOLDER, KILL_AT = Path(sys.argv[1]), int(sys.argv[2])
ROWS, BATCH, EPOCHS = 88, 16, 3  # the last batch of an epoch is smaller
RANK = int(os.environ["RANK"])


class Kill(keras.callbacks.Callback):
    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if RANK == 1 and os.environ["EDL_GENERATION"] == "0" and self.steps == KILL_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    random = np.random.default_rng(0)
    x, y = random.random((ROWS, 4), dtype=np.float32), random.integers(0, 10, ROWS)
    keras.utils.set_random_seed(RANK)  # the weights of rank 0 count
    layers = [
        keras.layers.Dense(8),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(10),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(keras.optimizers.Adam(0.01), DistillationLoss(), metrics=[DistillationAccuracy()])
    elastic = ElasticDataset(x, y, global_batch=BATCH)
    with SoftLabelDataset(elastic, os.environ["EDL_TEACHERS"], inputs="x", outputs="y") as dataset:
        callbacks = [ElasticCallback(elastic, interval_steps=1), Kill()]
        history = model.fit(dataset, epochs=EPOCHS, validation_data=(x, y), callbacks=callbacks, verbose=0)
    variables = [variable.numpy().tolist() for variable in [*model.variables, *model.optimizer.variables]]
    logs = {name: values[-1] for name, values in history.history.items()}
    (FOLDER / f"{RANK}.json").write_text(json.dumps({"variables": variables, "logs": logs, "epochs": history.epoch}))


if __name__ == "__main__":
    main()
