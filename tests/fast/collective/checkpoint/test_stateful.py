"""A `StatefulDataLoader` as a field of a `State`: its place comes back exactly, or is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

from torch.utils.data import IterableDataset, RandomSampler, get_worker_info  # noqa: E402

from edl.collective import Checkpointer, ElasticSampler, State  # noqa: E402
from edl.collective.checkpoint.state.metadata import parse_meta  # noqa: E402
from edl.errors import SettingsError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 uses it
ROWS, BATCH, EPOCHS = 12, 4, 2


class Stream(IterableDataset):
    """Numbers, every worker process its own, of which the first has half as many; it knows where it is."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        number = worker.id if worker else 0
        while self.position < 5 * (number + 1):
            self.position += 1
            yield 100 * number + self.position
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Plain(IterableDataset):
    """Numbers without a state: torchdata counts batches, and counts those twice that it skips in a restart."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(ROWS))


def loader_of(kind: str, workers: int, **options: Any) -> Any:
    torch.manual_seed(5)
    source = {"stream": Stream, "plain": Plain}.get(kind, lambda: list(range(ROWS)))()
    if kind in ("map", "drawn"):
        options |= {"shuffle": True, "generator": torch.Generator().manual_seed(5) if kind == "map" else None}
    return stateful.StatefulDataLoader(source, 2 if kind == "stream" else BATCH, num_workers=workers, **options)


def read(folder: Path, loader: Any, steps: int) -> list[list[float]]:
    """What is read from where `folder` says, up to so many steps from the beginning; saved in the end."""
    state = State(loader=loader, epoch=0, step=-1)
    batches = []
    with Checkpointer(state, storage=str(folder)) as checkpointer:
        checkpointer.restore()
        while state.epoch < EPOCHS and state.step + 1 < steps:
            for batch in loader:
                batches.append([*batch.tolist(), torch.rand(1).item()])  # dropout, for instance
                state.step += 1
                checkpointer.save(state.step)
                if state.step + 1 == steps:
                    return batches
            state.epoch += 1
    return batches


@pytest.mark.parametrize(
    ("kind", "workers", "options"),
    [
        ("map", 0, {}),
        ("map", 1, {"snapshot_every_n_steps": 2}),
        ("stream", 0, {}),
        ("stream", 2, {"drop_last": True}),
        ("drawn", 0, {}),
        ("drawn", 1, {"persistent_workers": True}),
    ],
)
def test_loader_goes_on_at_its_step(tmp_path: Path, kind: str, workers: int, options: dict[str, Any]) -> None:
    """Also where a second restart comes before a stream that has ended was asked for more."""
    whole = read(tmp_path / "whole", loader_of(kind, workers, **options), 99)
    epoch = len(whole) // EPOCHS
    assert epoch >= 3
    parts = []
    for steps in (epoch - 1, epoch, epoch + 1, 99):  # in an epoch, after its last batch, in the next
        parts += read(tmp_path / "parts", loader_of(kind, workers, **options), steps)
    assert parts == whole


def test_loader_not_begun_is_left_alone() -> None:
    loader = loader_of("map", 2)
    drawn = torch.get_rng_state()
    captured = State(loader=loader, rng=False).capture()
    assert loader._iterator is None, "a save started the worker processes of a loader that nobody reads"
    assert torch.equal(torch.get_rng_state(), drawn), "a save drew random numbers"
    assert captured.holders == {0}, "without its replica the place would be lost with its host"


@pytest.mark.parametrize("field", ["loader", "place"])
def test_place_is_refused_in_another_world(field: str) -> None:
    value = loader_of("map", 0) if field == "loader" else {"shard": 3}
    state = State(**{field: value}, per_rank=["place"])
    meta = parse_meta(state.capture().meta)
    assert meta.per_rank == {field}
    assert meta.sharded
    with pytest.raises(SettingsError, match=f"field {field} .* as many workers as before"):
        state.begin_load(meta, local=False)
    State(other=1).begin_load(meta, local=False)  # who does not want the place may go on without


def test_loader_that_cannot_say_is_refused() -> None:
    sampler = ElasticSampler(ROWS, global_batch=BATCH)
    ahead = stateful.StatefulDataLoader(list(range(ROWS)), batch_sampler=sampler, num_workers=1)
    with pytest.raises(SettingsError, match="give the State the sampler"):
        State(loader=ahead, sampler=sampler).capture()
    with pytest.raises(SettingsError, match="in_order=True"):
        State(loader=loader_of("map", 1, in_order=False)).capture()
    with pytest.raises(SettingsError, match="shuffles anew after a restart"):
        State(loader=stateful.StatefulDataLoader(range(9), sampler=RandomSampler(range(9)))).capture()
    for workers in (0, 1):
        plain = loader_of("plain", workers)
        next(iter(plain))
        with pytest.raises(SettingsError, match="of Plain, which has no state_dict"):
            State(loader=plain).capture()
    with pytest.raises(SettingsError, match="choose one"):
        State(loader=1, local=["loader"], per_rank=["loader"])
