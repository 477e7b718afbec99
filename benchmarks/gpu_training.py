"""What EDL costs a student on a GPU: steps per second with labels from a teacher, and the time that a save blocks.

`student` divides the steps per second of a student whose labels come from a teacher process on this machine by those
of the same loop with labels that lie on the GPU: a ResNet-50 with batches of 128 images, and (`student_tokens`) a Llama
of about 100 million parameters with 8 texts of 512 tokens and 64 labels for each token. Batches are pinned and copied
asynchronously. The teachers compute nothing (`edl.testing.models`), so that the GPU is the student's.

`vs_torch_save` and `vs_dcp_async` divide the seconds for which `torch.save` with fsync, and the call of DCP's
`async_save`, block a training loop by those of `Checkpointer.save`, for a state of 10 GB on the GPU.

Without a GPU the models are tiny, which shows that the benchmark works and measures nothing.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._harness import Goal, Options, Spread, divide, main, note, take_turns
from edl.collective import Checkpointer
from edl.distill import TopK
from edl.distill.losses import DistillLoss, token_loss
from edl.distill.torch import distill
from edl.testing import LocalTeacher
from edl_serving import Array, Backend, TensorSpec, TopKArrays
from tests.gpu import models
from tests.gpu.test_checkpoint import GIGABYTES, state_of, train

GOALS = [Goal("student", 0.95), Goal("student_tokens", 0.95), Goal("vs_torch_save", 10), Goal("vs_dcp_async", 2)]
TOP_K = 64
_WARM_UP_STEPS = 3


def steps_s(steps: Iterator[object], device: torch.device, seconds: float) -> float:
    """Return the number of training steps per second."""
    for _ in range(_WARM_UP_STEPS):
        next(steps)
    _synchronize(device)
    begin, count = time.perf_counter(), 0
    while time.perf_counter() < begin + seconds:
        next(steps)
        count += 1
    _synchronize(device)
    return count / (time.perf_counter() - begin)


class Student:
    """A ResNet on images whose labels come from a teacher, or are already on the GPU.

    Args:
        device: Device of the student.
        stack: Ends the teacher.
    """

    def __init__(self, device: torch.device, stack: ExitStack) -> None:
        large = device.type == "cuda"
        width, self._classes, size, rows = (64, 1000, 224, 128) if large else (8, 10, 32, 8)
        self._device = device
        self._model = models.resnet50(width=width, classes=self._classes).to(device)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._loss = DistillLoss(temperature=2.0, alpha=1.0)
        self._images = torch.randint(256, (4 * rows, 3, size, size), dtype=torch.uint8)
        self._loader = DataLoader(TensorDataset(self._images), batch_size=rows, pin_memory=large)
        self._rows = rows
        shape = [3, size, size]
        self._teacher = stack.enter_context(
            LocalTeacher("zeros", max_batch=rows, classes=self._classes, shape=shape, dtype="uint8")
        )

    def local(self) -> Iterator[None]:
        """Train with labels on the GPU, without end."""
        labels = torch.zeros(self._rows, self._classes, device=self._device)
        for (images,) in itertools.chain.from_iterable(itertools.repeat(self._loader)):
            self._step(images, labels)
            yield

    def distilled(self) -> Iterator[None]:
        """Train with the teacher's labels, without end."""
        with distill(self._loader, self._teacher.endpoint, inputs=["image"], outputs="logits") as labelled:
            while True:
                for (images,), labels in labelled:
                    self._step(images, _pinned(labels, self._device).to(self._device, non_blocking=True))
                    yield

    def _step(self, images: Tensor, labels: Tensor) -> None:
        pixels = images.to(self._device, non_blocking=True)
        pixels = pixels.to(memory_format=torch.channels_last).float().div_(255)
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            logits = self._model(pixels)
        self._loss(logits.float(), labels, None).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


class LikelyTokens(Backend):
    """A language model that computes nothing: the same 64 tokens are the most likely ones at every position.

    Args:
        vocabulary: Size of the student's vocabulary.
    """

    inputs = (TensorSpec("ids", "INT32"), TensorSpec("position", "INT32"))
    sequence_input = "position"
    max_top_k = TOP_K

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Return the only output, log-probabilities of the vocabulary."""
        return (TensorSpec("logprobs", "FP32", (self._vocabulary,)),)

    def predict(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return uniform log-probabilities, which are requested only at the start."""
        return {"logprobs": np.full((len(inputs["ids"]), self._vocabulary), -np.log(self._vocabulary), np.float32)}

    def predict_top_k(
        self, inputs: Mapping[str, Array], k: int, temperature: float
    ) -> Mapping[str, Array | TopKArrays]:
        """Return the first tokens of the vocabulary."""
        rows = len(inputs["ids"])
        values = np.full((rows, k), -np.log(2 * k), np.float32)
        return {
            "logprobs": TopKArrays(np.tile(np.arange(k, dtype=np.int32), (rows, 1)), values, values[:, 0] * 0 - 0.7)
        }


class TokenStudent:
    """A Llama on texts whose labels come from a teacher, or are already on the GPU.

    Args:
        device: Device of the student.
        folder: Folder for the student's configuration.
        stack: Ends the teacher.
    """

    def __init__(self, device: torch.device, folder: Path, stack: ExitStack) -> None:
        large = device.type == "cuda"
        hidden, layers, self._vocabulary, length = (768, 8, 32_000, 512) if large else (64, 1, 500, 32)
        sizes = {"hidden": hidden, "layers": layers, "vocabulary": self._vocabulary}
        self._device = device
        self._model = models.llama(folder / "student", **sizes, dtype=torch.float32).to(device).train()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        texts = torch.randint(1, self._vocabulary, (32, length))
        self._loader: DataLoader[dict[str, Tensor]] = DataLoader(
            [{"input_ids": text, "attention_mask": torch.ones_like(text)} for text in texts],  # type: ignore[arg-type]
            batch_size=8,
            pin_memory=large,
        )
        factory = f"{Path(__file__).resolve()}:LikelyTokens"
        self._teacher = stack.enter_context(LocalTeacher(factory, max_batch=8 * length, vocabulary=self._vocabulary))

    def local(self) -> Iterator[None]:
        """Train with labels on the GPU, without end."""
        with self._labelled() as labelled:
            labels = self._on_device(next(iter(labelled))[1])
        for batch in itertools.chain.from_iterable(itertools.repeat(self._loader)):
            self._step(batch, labels)
            yield

    def distilled(self) -> Iterator[None]:
        """Train with the teacher's labels, without end."""
        with self._labelled() as labelled:
            while True:
                for batch, labels in labelled:
                    self._step(batch, self._on_device(labels))
                    yield

    def _labelled(self) -> Any:
        return distill(
            self._loader,
            self._teacher.endpoint,
            inputs={"ids": "input_ids"},
            outputs="logprobs",
            tokens="attention_mask",
            top_k=TOP_K,
        )

    def _on_device(self, labels: TopK) -> TopK:
        return labels.map(lambda part: _pinned(part, self._device)).to(self._device, non_blocking=True)

    def _step(self, batch: dict[str, Tensor], labels: TopK) -> None:
        ids = batch["input_ids"].to(self._device, non_blocking=True)
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            logits = self._model(input_ids=ids, use_cache=False).logits
        token_loss(logits.float(), labels).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def saves(device: torch.device, folder: Path) -> dict[str, Callable[[], float]]:
    """Return functions that time a save of each side, in seconds for which the training loop is blocked."""
    state = state_of(device, GIGABYTES << 30 if device.type == "cuda" else 1 << 22)
    train(state, 0)
    dist.init_process_group("cpu:gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    checkpointer = Checkpointer(state, interval_steps=1)
    steps = itertools.count(1)

    def timed(save: Callable[[int], object]) -> float:
        for _ in range(2):  # the first save allocates memory that later ones reuse
            step = next(steps)
            train(state, step)
            _synchronize(device)
            begin = time.perf_counter()
            waiting = save(step)
            blocked_s = time.perf_counter() - begin
            if hasattr(waiting, "result"):
                waiting.result()
        return blocked_s

    def tensors() -> dict[str, Any]:
        return {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}

    def torch_save(step: int) -> None:
        with (folder / "saved.pt").open("wb") as file:
            torch.save(tensors(), file)
            file.flush()
            os.fsync(file.fileno())

    return {
        "edl": lambda: timed(checkpointer.save),
        "torch.save": lambda: timed(torch_save),
        "dcp.async_save": lambda: timed(lambda step: async_save(tensors(), checkpoint_id=folder / "dcp")),
    }


def measure(options: Options) -> dict[str, list[float]]:
    """Return the ratios of every round."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        student, tokens = Student(device, stack), TokenStudent(device, folder, stack)
        rounds = take_turns(
            {
                "student, labels on the GPU": lambda: steps_s(student.local(), device, options.seconds),
                "student, labels from a teacher": lambda: steps_s(student.distilled(), device, options.seconds),
                "tokens, labels on the GPU": lambda: steps_s(tokens.local(), device, options.seconds),
                "tokens, labels from a teacher": lambda: steps_s(tokens.distilled(), device, options.seconds),
                **saves(device, folder),
            },
            options.repeats,
        )
        dist.destroy_process_group()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU: tiny models on the CPU"
    note(f"{name}, torch {torch.__version__}\n")
    note("| side | steps per second, or seconds of a save |\n| --- | ---: |")
    for side, found in rounds.items():
        note(f"| {side} | {Spread.of(found)} |")
    return {
        "student": divide(rounds["student, labels from a teacher"], rounds["student, labels on the GPU"]),
        "student_tokens": divide(rounds["tokens, labels from a teacher"], rounds["tokens, labels on the GPU"]),
        "vs_torch_save": divide(rounds["torch.save"], rounds["edl"]),
        "vs_dcp_async": divide(rounds["dcp.async_save"], rounds["edl"]),
    }


def _pinned(tensor: Any, device: torch.device) -> Any:
    return tensor.pin_memory() if device.type == "cuda" and not tensor.is_pinned() else tensor


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main("gpu_training", measure, GOALS, __doc__)
