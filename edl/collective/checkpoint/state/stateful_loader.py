"""The place of a torchdata `StatefulDataLoader`, saved and restored so that the rest of the run does not differ.

The loader's own `state_dict` holds the place, and what follows is what it leaves out (torchdata 0.11):

- A loader that is iterated over draws a seed, from its generator or from torch's. A resumed epoch draws another than an
  epoch that was not broken off, so random numbers are put back behind it.
- A loader that was not iterated over starts its worker processes when it is asked for its state.
- A worker process that came to the end of its stream before others is asked again after a restart. A stream that begins
  anew at its end would give its samples twice.
- Some samplers and datasets cannot be resumed exactly, and no error says so. They are refused here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data._utils import fetch

from edl.errors import SettingsError

__all__ = ["is_stateful_loader", "loader_position", "prepare_loader", "resume_loader"]


def is_stateful_loader(value: Any) -> bool:
    """Return whether this is a `StatefulDataLoader` of torchdata."""
    # Another thread may be just importing it: then there is no such loader yet.
    kind = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", None)
    return kind is not None and isinstance(value, kind)


def prepare_loader(loader: Any) -> None:
    """Have the worker processes of a `StatefulDataLoader` say when their streams have ended, before they are made."""
    is_stream = isinstance(loader.dataset, IterableDataset)
    if loader.num_workers and is_stream and not isinstance(loader.worker_init_fn, _WorkerInit):
        loader.worker_init_fn = _WorkerInit(loader.worker_init_fn)


def loader_position(loader: Any) -> dict[str, Any]:
    """Return where a `StatefulDataLoader` is, as plain values and tensors; {} if it was not iterated over.

    Raises:
        SettingsError: the loader could not go on from there exactly.
    """
    _check_samplers(loader)
    if loader._iterator is None:
        resumption = vars(loader).get("_get_iterator")
        return resumption.place if isinstance(resumption, _Resumption) else {}
    state = loader.state_dict()
    if any(map(_only_counts, _dataset_states(state))):
        raise SettingsError(
            f"a StatefulDataLoader of {type(loader.dataset).__name__}, which has no state_dict, cannot be resumed "
            "twice: torchdata then leaves samples out. Give the dataset state_dict() and load_state_dict()"
        )
    generator = loader.generator if _draws_order(loader) else None
    return {"state": state, "generator": None if generator is None else generator.get_state()}


def resume_loader(loader: Any, place: dict[str, Any]) -> None:
    """Have the next iteration of a `StatefulDataLoader` go on from a place.

    The iterator is made when the loop asks for it, after `set_epoch` of a sampler.
    """
    vars(loader).pop("_get_iterator", None)
    loader._iterator = None
    loader.load_state_dict(place.get("state", {}))
    if place:
        loader._get_iterator = _Resumption(loader, place)


class _Resumption:
    """Makes the iterator of an epoch that was broken off, in place of the loader's method, once."""

    def __init__(self, loader: Any, place: dict[str, Any]) -> None:
        self._loader = loader
        self.place = place

    def __call__(self) -> Any:
        loader = self._loader
        del loader._get_iterator
        drawn = torch.get_rng_state()
        prepare_loader(loader)
        begin_worker = loader.worker_init_fn
        if isinstance(begin_worker, _WorkerInit):
            begin_worker.ended = _ended_workers(self.place["state"])
            iterator = loader._get_iterator()
            begin_worker.ended = frozenset()  # of the next epoch none has
        else:
            iterator = loader._get_iterator()
        torch.set_rng_state(drawn)
        if self.place["generator"] is not None:
            loader.generator.set_state(self.place["generator"])
        return iterator


class _StreamFetcher(fetch._IterableDatasetFetcher):
    """Reads a stream until its end, and not again from its beginning; in worker processes it takes torch's place.

    torch's own does not remember the end of a stream that makes batches itself, and torchdata resets what it remembers.

    Attributes:
        begins_ended: whether the next fetcher made in this process is at its end already.
    """

    begins_ended = False

    def __init__(self, *args: Any) -> None:
        self._ended = _StreamFetcher.begins_ended
        _StreamFetcher.begins_ended = False
        super().__init__(*args)

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to read; once it is, it stays so."""
        return self._ended

    @ended.setter
    def ended(self, ended: bool) -> None:
        self._ended = self._ended or ended

    def fetch(self, possibly_batched_index: Any) -> Any:
        """Return the next batch."""
        try:
            return super().fetch(possibly_batched_index)  # type: ignore[no-untyped-call]
        except StopIteration:
            self._ended = True
            raise


class _WorkerInit:
    """What a worker process of a loader does first: what the script wants, and to remember the end of its stream.

    Attributes:
        ended: numbers of the workers whose streams have ended in the epoch that is gone on with.
    """

    def __init__(self, function: Callable[[int], object] | None) -> None:
        self._function = function
        self.ended: frozenset[int] = frozenset()

    def __call__(self, worker_id: int) -> None:
        _StreamFetcher.begins_ended = worker_id in self.ended
        fetch._IterableDatasetFetcher = _StreamFetcher  # type: ignore[assignment,misc]
        if self._function is not None:
            self._function(worker_id)


def _ended_workers(state: dict[str, Any]) -> frozenset[int]:
    """Return the numbers of the workers that have read their streams to the end, by a loader's state."""
    workers = (state.get("_snapshot") or {}).get("_worker_snapshots", {}).values()
    fetchers = ((worker["worker_id"], worker.get("fetcher_state") or {}) for worker in workers if worker)
    return frozenset(number for number, fetcher in fetchers if fetcher.get("fetcher_ended"))


def _check_samplers(loader: Any) -> None:
    if loader.num_workers and not loader.in_order:
        raise SettingsError("a StatefulDataLoader with in_order=False cannot say where it is: use in_order=True")
    for sampler in (loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if getattr(sampler, "keeps_place", False):
            raise SettingsError(
                f"the place of a StatefulDataLoader with {type(sampler).__name__} is that of the sampler, since the "
                "loader reads ahead: give the State the sampler, not the loader"
            )
        stateless = not hasattr(sampler, "state_dict")
        if stateless and isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
            raise SettingsError(
                f"torch's {type(sampler).__name__} shuffles anew after a restart: give the StatefulDataLoader "
                "shuffle=True, or a sampler with state_dict() and load_state_dict(), or use ElasticSampler"
            )


def _draws_order(loader: Any) -> bool:
    """Return whether an epoch's order is drawn at its beginning, from the generator of the loader's seeds."""
    module = sys.modules["torchdata.stateful_dataloader.sampler"]
    sampler = loader.sampler
    return (
        loader.generator is not None
        and isinstance(sampler, module.RandomSampler)
        and sampler.generator is loader.generator
        and not sampler.replacement
    )


def _dataset_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what is in the loader's state of the dataset, once, or for every worker process."""
    if "_snapshot" not in state:
        return [state]
    return [worker for worker in state["_snapshot"]["_worker_snapshots"].values() if worker]


def _only_counts(state: dict[str, Any]) -> bool:
    """Return whether the place in a stream is a count of batches."""
    fetcher = state.get("fetcher_state")
    return fetcher is not None and fetcher.get("dataset_iter_state") is None and state.get("dataset_state") is None
