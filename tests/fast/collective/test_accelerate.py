"""A loop of Accelerate without a process group: restarts in one process, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")

from edl.collective.accelerate import ElasticLoop  # noqa: E402
from edl.collective.checkpoint.memory.slots import SlotPair  # noqa: E402
from edl.errors import SettingsError  # noqa: E402

ROWS = torch.linspace(-1, 1, 4 * 26).reshape(26, 4)


class Seen:
    """What the loop has seen: registered for checkpointing."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"sums": list(self.sums)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.sums = list(saved["sums"])


def train(
    folder: Path,
    until: int = -1,
    size: int = 2,
    steps: int = 2,
    stream: bool = False,
    workers: str = "",
    count: int = 3,
    **seedable: Any,
) -> Any:
    """Train `count` epochs, or until it breaks off. Returns the model, what it has seen, and from which epoch on."""
    folder.mkdir(exist_ok=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    torch.manual_seed(0)
    config = accelerate.DataLoaderConfiguration(**seedable)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps, dataloader_config=config)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    data = Stream() if stream else torch.utils.data.TensorDataset(ROWS)
    generator = torch.Generator().manual_seed(1) if workers == "own" else None
    settings = {"num_workers": 1, "persistent_workers": True, "generator": generator} if workers else {}
    loader = torch.utils.data.DataLoader(data, batch_size=size, shuffle=None if stream else True, **settings)
    checks = torch.utils.data.DataLoader(data, batch_size=13, **settings)
    model, optimizer, schedule, loader, checks = accelerator.prepare(model, optimizer, schedule, loader, checks)
    seen, epochs = Seen(), []
    accelerator.register_for_checkpointing(seen)
    loop = ElasticLoop(accelerator, interval_steps=1, slots=SlotPair(folder / "slots"))
    for epoch in loop.epochs(count):
        epochs.append(epoch)
        for (rows,) in loop.batches(loader):
            seen.sums.append(rows.sum().item())
            with accelerator.accumulate(model):
                accelerator.backward((model(rows).squeeze(-1) - rows.sum(1)).square().mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if len(seen.sums) == until:
                raise LookupError("broken off")
        seen.sums.append(torch.rand(1).item())  # an evaluation that draws
        seen.sums[-1] += sum(rows.sum().item() for (rows,) in checks) if workers else 0
    model.steps = loop._place.steps
    return model, seen.sums, epochs


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter([(row,) for row in ROWS])


# Thirteen batches and an evaluation in each epoch. At 15 the last state saved is that of the first epoch's last batch.
@pytest.mark.parametrize(
    ("until", "begin", "options"),
    [(15, 0, {}), (20, 1, {"stream": True}), (20, 1, {"workers": "global"}), (20, 1, {"workers": "own"})],
)
def test_goes_on_as_if_undisturbed(tmp_path: Path, until: int, begin: int, options: dict[str, Any]) -> None:
    """Also where persistent workers draw from the global generator, and from the loader's own."""
    model, seen, _ = train(tmp_path / "whole", **options)
    with pytest.raises(LookupError):
        train(tmp_path / "broken", until, **options)
    again, other, epochs = train(tmp_path / "broken", **options)
    assert epochs[0] == begin
    assert other == seen, "the same batches in the same order, and each once"
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    finished, last, epochs = train(tmp_path / "broken", **options)
    assert not epochs, "a finished loop is not repeated"
    assert last[:-1] == seen[:-1]
    assert torch.equal(finished[0].weight, model[0].weight)
    with pytest.raises(SettingsError, match=r"ended after 3 epochs, but epochs\(4\) requests more"):
        train(tmp_path / "broken", count=4)


def test_a_resumed_epoch_is_not_left_out(tmp_path: Path) -> None:
    with pytest.raises(LookupError):
        train(tmp_path, 20)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    loop = ElasticLoop(accelerate.Accelerator(cpu=True), slots=SlotPair(tmp_path / "slots"))
    loop._fields = lambda: {"place": loop._place}  # a script that trains nothing more
    epochs = loop.epochs(3)
    assert next(epochs) == 1
    with pytest.raises(SettingsError, match=r"epoch 1 .* leave the loop over epochs with break"):
        next(epochs)


def test_next_step_is_a_whole_one(tmp_path: Path) -> None:
    """One step of two batches was trained, and the next is one of four."""
    seedable = {"use_seedable_sampler": True}
    with pytest.raises(LookupError):
        train(tmp_path, 3, **seedable)
    model, seen, _ = train(tmp_path, size=1, steps=4, **seedable)
    assert len(seen) == 2 + (26 - 4) + 1 + (26 + 1) * 2
    assert model.steps == 7 * 3


def test_model_not_prepared_is_refused(tmp_path: Path) -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    accelerator.prepare(torch.optim.Adam(model.parameters()))
    loop = ElasticLoop(accelerator, slots=SlotPair(tmp_path / "slots"))
    with pytest.raises(SettingsError, match=r"Adam changes 2 parameters, one of shape \(1, 4\).*accelerator\.prepare"):
        next(loop.epochs(1))
    accelerator.register_for_checkpointing(model)
    assert list(ElasticLoop(accelerator, slots=SlotPair(tmp_path / "other")).epochs(1)) == [0]


def test_what_cannot_go_on_is_refused(tmp_path: Path) -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    loop = ElasticLoop(accelerator, slots=SlotPair(tmp_path / "slots"))
    with pytest.raises(SettingsError, match="once in each epoch"):
        next(loop.batches([1, 2]))
    for _ in loop.epochs(1):
        assert list(loop.batches([1, 2])) == [1, 2]
        with pytest.raises(SettingsError, match="once in each epoch"):
            next(loop.batches([1, 2]))
    with pytest.raises(SettingsError, match="one loop over epochs"):
        next(loop.epochs(1))
    accelerator.state.distributed_type = accelerate.DistributedType.DEEPSPEED
    with pytest.raises(SettingsError, match="DEEPSPEED keeps parameters"):
        ElasticLoop(accelerator)
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    with pytest.raises(SettingsError, match="fsdp_version=2"):
        ElasticLoop(accelerator)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
