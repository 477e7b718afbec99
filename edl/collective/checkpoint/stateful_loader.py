"""The place of a torchdata `StatefulDataLoader`, saved and restored so that the rest of the run does not differ.

The loader's own `state_dict` holds the place, and what follows is what it leaves out (torchdata 0.11):

- A loader that is iterated over draws a seed, from its generator or from torch's. A resumed epoch draws one more than
  one that was not broken off, so random numbers are put back behind it.
- A loader that nobody has iterated over starts its worker processes when it is asked for its state.
- Some samplers and datasets cannot be resumed exactly, and no error says so. They are refused here.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from edl.errors import SettingsError

__all__ = ["is_stateful_loader", "place_of", "resume"]


def is_stateful_loader(value: Any) -> bool:
    """Whether this is a `StatefulDataLoader` of torchdata."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and isinstance(value, module.StatefulDataLoader)


def place_of(loader: Any) -> dict[str, Any]:
    """Return where a `StatefulDataLoader` is, as plain values and tensors; {} for one that was not iterated over.

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


def resume(loader: Any, place: dict[str, Any]) -> None:
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
        self._loader, self.place = loader, place

    def __call__(self) -> Any:
        loader = self._loader
        del loader._get_iterator
        drawn = torch.get_rng_state()
        iterator = loader._get_iterator()
        torch.set_rng_state(drawn)
        if self.place["generator"] is not None:
            loader.generator.set_state(self.place["generator"])
        return iterator


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
    """Whether an epoch's order is drawn at its beginning, from the generator that the loader's seeds are drawn from."""
    module = sys.modules["torchdata.stateful_dataloader.sampler"]
    sampler = loader.sampler
    return (
        loader.generator is not None
        and isinstance(sampler, module.RandomSampler)
        and sampler.generator is loader.generator
        and not sampler.replacement
    )


def _dataset_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    """What is in the loader's state of the dataset, once, or for each worker process."""
    if "_snapshot" not in state:
        return [state]
    return [worker for worker in state["_snapshot"]["_worker_snapshots"].values() if worker]


def _only_counts(state: dict[str, Any]) -> bool:
    """Whether the place in a stream is a count of batches."""
    fetcher = state.get("fetcher_state")
    return fetcher is not None and fetcher.get("dataset_iter_state") is None and state.get("dataset_state") is None
