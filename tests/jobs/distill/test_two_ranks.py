"""Two ranks make the update of one, with all texts in a batch, however samples are shared out between them.

Run as a script, this is a rank: it makes a step over all texts in each of the ways in which a `Trainer` shares them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", "5.23", reason="transformers is not installed, or too old")

from edl.distill.transformers import DistillArguments, DistillTrainer  # noqa: E402
from edl.testing import LocalTeacher  # noqa: E402
from tests.fast.distill.trainers.students import (  # noqa: E402
    VOCABULARY,
    collate_flat,
    collate_left,
    collate_right,
    expected_loss,
    parameters,
    small_mixture,
    small_model,
    texts,
    training_arguments,
)

ROOT = Path(__file__).parents[3]
RUN_S = 300.0  # every rank imports transformers, which takes a minute on a busy machine
LENGTH = 14


class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc, name-defined, type-arg]
    """All texts, in their order."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(texts(self._count))


def collate_to_length(samples: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
    """Pad to the same length, since rank 0 puts the batches of all ranks together when it reads for them."""
    batch = collate_right(samples)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: torch.nn.functional.pad(part, (0, LENGTH - part.shape[1]), value=fill[name])
        for name, part in batch.items()
    }


WAYS: dict[str, dict[str, Any]] = {
    "shuffled": {"count": 24},
    "by length": {"count": 24, "train_sampling_strategy": "group_by_length"},
    "left, uneven": {"count": 22, "train_sampling_strategy": "sequential", "collate": collate_left},
    "dropped": {"count": 23, "train_sampling_strategy": "sequential", "dataloader_drop_last": True},
    "flat": {"count": 24, "collate": collate_flat},
    "split": {
        "count": 24,
        "collate": collate_to_length,
        "accelerator_config": {"dispatch_batches": True, "split_batches": True},
        "per_device_train_batch_size": 6,
    },
    "stream": {"count": 24, "collate": collate_to_length, "stream": True},
    "workers": {"count": 24, "dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    "chunked": {"count": 24, "chunked_head": True},
    "compiled": {"count": 24, "torch_compile": True, "torch_compile_backend": "aot_eager"},
    "experts": {"count": 24, "train_sampling_strategy": "sequential", "experts": True},
    "own count": {"count": 24, "train_sampling_strategy": "sequential", "average_tokens_across_devices": False},
}


@pytest.mark.timeout(400)
def test_two_ranks_make_the_update_of_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [__file__, str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with LocalTeacher("prefix_scores", vocabulary=VOCABULARY) as teacher:
        environ["EDL_TEACHERS"] = teacher.endpoint
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == WAYS.keys()
    for name, way in WAYS.items():
        samples = texts(way["count"])
        if name.endswith("uneven"):  # filled up from the beginning
            samples += samples[:2]
        if name == "dropped":  # a batch of two, and one that is no rank's
            samples = samples[:18]
        shares = [samples]
        if "own" in name:  # a mean of the ranks' means; they take batches of three in turns
            shares = [[text for at, text in enumerate(samples) if at // 3 % 2 == rank] for rank in range(2)]
        student = small_mixture(2) if name == "experts" else small_model(2)
        loss = torch.stack([expected_loss(student, share, k=5, beta=0.5, hard=0.25) for share in shares]).mean()
        if name == "experts":  # a router's loss is of a batch, and the step's is the mean over all of them
            batches = [collate_right(samples[at : at + 3]) for at in range(0, 24, 3)]
            added = torch.stack([student(**{**batch, "labels": None}).aux_loss for batch in batches]).mean()
            loss = loss + 0.5 * added
        loss.backward()
        with torch.no_grad():
            for parameter in student.parameters():
                parameter -= 0.5 * parameter.grad
        difference = (torch.tensor(found[name]["parameters"]) - parameters(student)).abs().max()
        assert difference < 1e-5, f"{name}: off by {difference}"
        assert found[name]["loss"] == pytest.approx(loss.item(), abs=1e-4), name


def train(folder: Path, name: str) -> dict[str, Any]:
    settings = {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 3 if name == "dropped" else 4,
        "max_steps": 1,
        "lr_scheduler_type": "constant",
        **WAYS[name],
    }
    count, collate = settings.pop("count"), settings.pop("collate", collate_right)
    data: Any = Stream(count) if settings.pop("stream", False) else texts(count)
    chunked = settings.pop("chunked_head", False)
    trainer = DistillTrainer(
        small_mixture(2) if settings.pop("experts", False) else small_model(2),
        training_arguments(folder / "out", **settings),
        train_dataset=data,
        data_collator=collate,
        distill_args=DistillArguments(top_k=5, beta=0.5, hard_weight=0.25, chunked_head=chunked, ahead=2),
    )
    trainer.train()
    return {"parameters": parameters(trainer.model).tolist(), "loss": trainer.state.log_history[0]["loss"]}


if __name__ == "__main__":
    ways = {way: train(Path(sys.argv[1]), way) for way in WAYS}
    if torch.distributed.get_rank() == 0:
        (Path(sys.argv[1]) / "found.json").write_text(json.dumps(ways))
    torch.distributed.destroy_process_group()
