"""A `StatefulDataLoader` as a field of a `State`: its place comes back exactly, or is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

from torch.utils.data import IterableDataset, RandomSampler, get_worker_info  # noqa: E402

from edl.collective import Checkpointer, ElasticSampler, State, run_in_process  # noqa: E402
from edl.collective.checkpoint.state.metadata import parse_meta  # noqa: E402
from edl.errors import SettingsError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 uses it

ROWS, BATCH, EPOCHS = 24, 4, 2


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Numbers, every worker process its own; it knows where it is."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        while self.position < ROWS // count:
            self.position += 1
            yield (self.position - 1) * count + number
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Uneven(Stream):
    """A stream of which the first worker has half as much; with `whole` it makes batches itself."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.whole = whole

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number = worker.id if worker else 0
        while self.position < 5 * (number + 1):
            self.position += 1
            value = 100 * number + self.position
            yield torch.tensor([value]) if self.whole else value
        self.position = 0


class Plain(IterableDataset):  # type: ignore[type-arg]
    """Numbers without a state: torchdata counts batches, and counts those twice that it skips in a restart."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(ROWS))


def loader_of(kind: str, workers: int, **options: Any) -> Any:
    torch.manual_seed(5)
    source = {"stream": Stream, "plain": Plain}.get(kind, lambda: list(range(ROWS)))()
    if kind in ("map", "drawn"):
        options |= {"shuffle": True, "generator": torch.Generator().manual_seed(5) if kind == "map" else None}
    return stateful.StatefulDataLoader(source, BATCH, num_workers=workers, **options)


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
        ("map", 2, {"snapshot_every_n_steps": 3}),
        ("stream", 0, {}),
        ("stream", 2, {}),
        ("drawn", 0, {}),
        ("drawn", 2, {"persistent_workers": True}),
    ],
)
def test_loader_goes_on_at_its_step(tmp_path: Path, kind: str, workers: int, options: dict[str, Any]) -> None:
    whole = read(tmp_path / "whole", loader_of(kind, workers, **options), 99)
    assert len(whole) == EPOCHS * ROWS // BATCH
    parts = []
    for steps in (1, 5, 6, 8, 99):  # in an epoch, after its last batch, in the next
        parts += read(tmp_path / "parts", loader_of(kind, workers, **options), steps)
    assert parts == whole


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"drop_last": True}, {"whole": True}])
def test_stream_that_ended_is_not_read_again(tmp_path: Path, options: dict[str, Any]) -> None:
    """Also where a second restart comes before it was asked for more."""

    def loader() -> Any:
        torch.manual_seed(5)
        own = {key: value for key, value in options.items() if key != "whole"}
        whole = "whole" in options
        return stateful.StatefulDataLoader(Uneven(whole), None if whole else 2, num_workers=2, **own)

    expected = read(tmp_path / "whole", loader(), 99)
    parts = []
    for steps in (len(expected) // 2 - 2, len(expected) // 2 - 1, len(expected) // 2, len(expected) - 1, 99):
        parts += read(tmp_path / "parts", loader(), steps)
    assert parts == expected


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


def test_staying_refuses_a_place() -> None:
    state = State(loader=loader_of("map", 0))
    with Checkpointer(state) as checkpointer, pytest.raises(SettingsError, match="place of the lost one"):
        run_in_process(lambda place: None, state=state, checkpointer=checkpointer)
