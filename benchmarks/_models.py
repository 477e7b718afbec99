"""Teachers for benchmarks, as `edl serve --factory benchmarks._models:Sleeper` makes them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._load import IMAGE, TOP_K, VOCABULARY, likeliest_of
from edl.protocol import names
from edl_serving import Backend, TensorSpec, TopKArrays

__all__ = ["Sleeper", "TokenSleeper", "label_of"]

Arrays = Mapping[str, "np.ndarray[Any, np.dtype[Any]]"]


def label_of(ids: Any) -> Any:
    """Return the label of each row, which reveals labels on the wrong row."""
    return ids * 7 + 1


class Sleeper:
    """A teacher that sleeps instead of computing, and whose answers identify their row and the teacher.

    Input `id` INT64 [rows, 1], and with `classes` above 0 `image` of `dtype` (read, not computed with). Outputs `label`
    INT64 [rows, 2]: `label_of(id)` and the teacher's number; with `classes`, `logits` FP32 [rows, classes] as well.

    Args:
        number: Number of this teacher.
        seconds: Seconds that a batch of any size takes.
        every, factor: Every `every`-th batch takes `factor` times as long; 0 for none.
        log: A file to which the first id of each batch is written when its computation begins. It survives SIGKILL.
    """

    def __init__(
        self,
        number: int = 0,
        seconds: float = 0.02,
        every: int = 0,
        factor: float = 10.0,
        log: str = "",
        classes: int = 0,
        dtype: str = "uint8",
    ) -> None:
        self._number = number
        self._seconds = seconds
        self._every = every
        self._factor = factor
        self._log = Path(log).open("a", buffering=1) if log else None  # noqa: SIM115 - closed with the process
        self._classes = classes
        self._batches = self._number * 11  # so that not all teachers are slow at once
        self.version = "1"  # the teachers differ in their numbers, not in their weights
        self.inputs = ["id:int64[1]"]
        self.outputs = ["label:int64[2]"]
        if self._classes:
            self.inputs.append(f"image:{dtype}[{','.join(map(str, IMAGE))}]")
            self.outputs.append(f"logits:float32[{self._classes}]")

    def __call__(self, inputs: Arrays) -> Arrays:
        ids = inputs["id"]
        if self._log is not None:
            self._log.write(f"{ids[0, 0]}\n")
        self._batches += 1
        late = self._every and self._batches % self._every == 0
        time.sleep(self._seconds * (self._factor if late else 1.0))
        outputs = {"label": np.concatenate([label_of(ids), np.full_like(ids, self._number)], axis=1)}
        if self._classes:
            outputs["logits"] = np.broadcast_to(ids.astype(np.float32), (len(ids), self._classes)).copy()
        return outputs

    def warm_up(self, max_rows: int) -> None:
        """Do nothing: nothing needs warming up, and `log` is for real requests."""


class TokenSleeper(Backend):
    """A language model that sleeps instead of computing, and whose most likely token identifies its row.

    Args:
        seconds: Seconds that a batch of any size takes.
    """

    inputs = (TensorSpec(names.IDS, "INT32"), TensorSpec(names.POSITION, "INT32"))
    outputs = (TensorSpec(names.LOGPROBS, "FP32", (VOCABULARY,)),)
    version = "1"
    sequence_input = names.POSITION
    max_top_k = TOP_K

    def __init__(self, seconds: float = 0.02) -> None:
        self._seconds = seconds

    def predict(self, inputs: Arrays) -> Arrays:
        raise NotImplementedError("whole outputs are not asked for")

    def predict_top_k(self, inputs: Arrays, k: int, temperature: float) -> Mapping[str, Any]:
        time.sleep(self._seconds)
        first = likeliest_of(inputs[names.IDS])
        ids = (first[:, None] + np.arange(k, dtype=np.int32)) % VOCABULARY
        probabilities = 0.9 * 0.5 ** np.arange(1, k + 1)
        values = np.broadcast_to(np.log(probabilities).astype(np.float32), ids.shape).copy()
        tail = np.full(len(ids), np.log(1 - probabilities.sum()), np.float32)
        return {names.LOGPROBS: TopKArrays(ids.astype(np.int32), values, tail)}

    def warm_up(self, max_rows: int) -> None:
        """Do nothing: nothing needs warming up."""
