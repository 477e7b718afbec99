"""Models for tests: `edl serve --factory edl.testing.models:NAME --option KEY=VALUE`.

Like a device, these models take time for each batch. The following options control this time:

- `delay_s`: seconds for a batch of any size; `row_s`: additional seconds for each row;
- `straggle`: the share of batches that take `straggle_factor` times as long; these batches are drawn with `seed`.

The models sleep during that time, so many teachers fit on one machine. `version` is the model's version in label
caches.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Arrays: TypeAlias = Mapping[str, Array]

_PRIME = 2039  # the largest below 2048: every remainder is exact in float16 as well


class Model:
    """A function over arrays that takes a given total time; the module's docstring describes the options.

    `inputs` and `outputs` are tensors as text, such as `"x:float32[4]"`. `sequence_input` is the input that is 0 at the
    start of a sequence; None if rows are independent.
    """

    def __init__(
        self,
        function: Callable[[Arrays], Arrays],
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        sequence_input: str | None = None,
        version: str | int = "1",
        delay_s: float = 0.0,
        row_s: float = 0.0,
        straggle: float = 0.0,
        straggle_factor: float = 10.0,
        seed: int = 0,
    ) -> None:
        if not 0 <= straggle <= 1 or min(delay_s, row_s, straggle_factor) < 0:
            raise ValueError(f"straggle={straggle} must be in [0, 1], and times not below 0")
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self.sequence_input = sequence_input
        self.version = str(version)
        self._function = function
        self._delay_s = delay_s
        self._row_s = row_s
        self._straggle = straggle
        self._straggle_factor = straggle_factor
        self._random = random.Random(seed)

    def __call__(self, inputs: Arrays) -> Arrays:
        """Return outputs for a batch."""
        started = time.monotonic()
        outputs = self._function(inputs)
        takes_s = self._delay_s + self._row_s * len(next(iter(inputs.values())))
        if self._straggle and self._random.random() < self._straggle:
            takes_s *= self._straggle_factor
        if takes_s:
            time.sleep(max(0.0, started + takes_s - time.monotonic()))
        return outputs

    def warm_up(self, max_rows: int) -> None:
        """Do nothing: there is nothing to load, and faults apply only to requests."""


def zeros(
    classes: int = 1000, shape: Sequence[int] = (3, 224, 224), dtype: str = "uint8", name: str = "image", **options: Any
) -> Model:
    """Map any `name` [rows, *shape] to `logits` FP32 [rows, classes], all zeros: a teacher that costs no time."""
    kept: dict[int, Arrays] = {}

    def answer(inputs: Arrays) -> Arrays:
        rows = len(inputs[name])
        if rows not in kept:
            kept[rows] = {"logits": np.zeros((rows, classes), np.float32)}
        return kept[rows]

    return Model(answer, [_spec(name, dtype, shape)], [f"logits:float32[{classes}]"], **options)


def echo(width: int = 4, scale: float = 1.0, repeat: int = 1, **options: Any) -> Model:
    """Map `x` FP32 [rows, width] to `y` FP32 [rows, width * repeat]: row times `scale`, repeated `repeat` times."""

    def answer(inputs: Arrays) -> Arrays:
        return {"y": np.tile(inputs["x"] * np.float32(scale), (1, repeat))}

    return Model(answer, [f"x:float32[{width}]"], [f"y:float32[{width * repeat}]"], **options)


def linear(width: int = 4, **options: Any) -> Model:
    """Map `x` FP32 [rows, width] to `y` FP32 [rows, width]: `x @ arange(width * width).reshape(width, width)`."""
    weights = np.arange(width * width, dtype=np.float32).reshape(width, width)
    return Model(
        lambda inputs: {"y": inputs["x"] @ weights}, [f"x:float32[{width}]"], [f"y:float32[{width}]"], **options
    )


def fingerprint(
    classes: int = 10, shape: Sequence[int] = (4,), dtype: str = "float32", name: str = "x", **options: Any
) -> Model:
    """Map any `name` [rows, *shape] to `y` FP32 [rows, classes]: `fingerprint_of` each row, which tells rows apart."""

    def answer(inputs: Arrays) -> Arrays:
        return {"y": fingerprint_of(inputs[name], classes)}

    return Model(answer, [_spec(name, dtype, shape)], [f"y:float32[{classes}]"], **options)


def fingerprint_of(rows: Array, classes: int = 10) -> Array:
    """Return the answer of `fingerprint`: whole numbers below 2039, computed from all bytes of a row.

    Two different rows agree in all classes with a probability of about 2039 to the power of -min(classes, 5), and the
    numbers are exact in FP32 and FP16. A label that belongs to a different input is therefore noticed. `rows` is [rows,
    ...] of any numeric dtype; the answer is FP32 [rows, classes].
    """
    data = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    if data.shape[1] % 8 == 0:
        data = data.view(np.uint64)
    sums = np.einsum("rb,b->r", data, _factors(2039, data.shape[1]), dtype=np.uint64, casting="safe")
    return _mixed(sums, classes)


def _factors(seed: int, count: int) -> Array:
    """Return odd numbers, so that every bit counts. Their products and sums wrap at 2**64, as in numpy's uint64."""
    drawn: Array = np.random.default_rng(seed).integers(1 << 63, size=count, dtype=np.uint64)
    return drawn * np.uint64(2) + np.uint64(1)


def _mixed(sums: Array, count: int) -> Array:
    mixed: Array = (sums[:, None] * _factors(9302, count)) >> np.uint64(32)
    return (mixed % np.uint64(_PRIME)).astype(np.float32)


def prefix_scores(vocabulary: int = 16, name: str = "logprobs", **options: Any) -> Model:
    """Map `ids` and `position` INT32 [rows] to `name` FP32 [rows, vocabulary]: each sequence's `prefix_scores_of`.

    As in a language model, a row's answer depends on all tokens of its sequence up to this row, so a split or shifted
    sequence is noticed. The model declares that its rows belong to sequences (`sequence_input`), so batches must
    contain whole sequences.
    """

    def answer(inputs: Arrays) -> Arrays:
        ids, position = inputs["ids"], inputs["position"]
        starts = np.flatnonzero(position == 0)
        expected = np.arange(len(ids)) - np.repeat(starts, np.diff([*starts, len(ids)])) if position[0] == 0 else None
        if expected is None or (position != expected).any():
            raise ValueError(f"positions {position.tolist()} do not belong to whole sequences")
        found = [prefix_scores_of(part, vocabulary) for part in np.split(ids, starts[1:])]
        return {name: np.concatenate(found)}

    return Model(
        answer,
        ["ids:int32[]", "position:int32[]"],
        [f"{name}:float32[{vocabulary}]"],
        sequence_input="position",
        **options,
    )


def prefix_scores_of(ids: Array, vocabulary: int = 16) -> Array:
    """Return the answer of `prefix_scores` for the ids of a sequence: FP32 [tokens, vocabulary] from -15.9 to 0."""
    tokens = np.asarray(ids, np.int64).astype(np.uint64) + np.uint64(1)
    steps = np.arange(1, len(tokens) + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):  # sums wrap around at 2**64
        prefixes = np.cumsum(tokens * (steps * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)), dtype=np.uint64)
    return _mixed(prefixes, vocabulary) / np.float32(-128)


def nan(width: int = 4, **options: Any) -> Model:
    """Do the same as `echo`, but with NaN in the last element of every row; for the options, see `_faulty`."""

    def spoil(y: Array) -> Array:
        y[:, -1] = math.nan
        return y

    return _faulty(spoil, width, **options)


def raises(width: int = 4, message: str = "boom", **options: Any) -> Model:
    """Do the same as `echo`, but raise RuntimeError with `message`; for the options, see `_faulty`."""

    def spoil(y: Array) -> Array:
        raise RuntimeError(message)

    return _faulty(spoil, width, **options)


def _faulty(
    spoil: Callable[[Array], Array],
    width: int,
    every: int = 1,
    while_exists: str = "",
    above: float = -math.inf,
    **options: Any,
) -> Model:
    """Return a model that echoes its input, and misbehaves when all of the following conditions hold.

    The batch is the last of every `every` batches; the file `while_exists`, if given, exists; and the first number of
    at least one row is greater than `above`.
    """
    batches = 0

    def answer(inputs: Arrays) -> Arrays:
        nonlocal batches
        batches += 1
        x = inputs["x"]
        due = (
            batches % every == 0 and (not while_exists or Path(while_exists).exists()) and bool((x[:, 0] > above).any())
        )
        y = x * np.float32(1)
        return {"y": spoil(y) if due else y}

    return Model(answer, [f"x:float32[{width}]"], [f"y:float32[{width}]"], **options)


def _spec(name: str, dtype: str, shape: Sequence[int]) -> str:
    return f"{name}:{dtype}[{','.join(map(str, shape))}]"
