"""Saves what keeps a resumed epoch the same: random numbers, and positions of torchdata's `StatefulDataLoader`.

A loader's own `state_dict` does not cover some cases (torchdata 0.11):

- Iterating over a loader draws a seed. A resumed epoch draws another seed, so random numbers are restored after that
  draw.
- A loader that was never iterated over starts its worker processes when it is asked for its state.
- Some samplers and datasets cannot be resumed exactly, and torchdata reports no error. This module refuses them.
- A stream, or a sampler with a state, keeps a restored position until something is read. Torchdata doesn't read from a
  stream that has ended, so the next epoch begins at that position, with nothing left to read. Such an object also
  reports a wrong state if it is asked for its state before it has read anything.

  So torchdata iterates over a `_Source`, which reports the restored state until something is read after a restart. A
  source that has ended is not read again. Instead, its position is loaded into the object, and `_Source` tries to read
  one sample. If the object is at its end, there is no sample, and the attempt clears the position. If the object starts
  over at its end, there is a sample, and the position, which is the next epoch's beginning, is loaded once more.
"""

from __future__ import annotations

import collections
import copy
import random
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import (
    IterableDataset,
    IterDataPipe,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from edl.errors import SettingsError


def capture_random_states() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators, and of the current CUDA device's if in use."""
    version, words, gauss = random.getstate()
    states = {
        "python": (version, np.array(words, np.uint32), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def is_stateful_loader(value: Any) -> bool:
    # Another thread may be importing torchdata right now; then no such loader exists yet.
    kind = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", None)
    return kind is not None and isinstance(value, kind)


def prepare_loader(loader: Any) -> None:
    """Make a `StatefulDataLoader` iterate over a `_Source`, starting with its next iterator."""
    if not isinstance(vars(loader).get("_get_iterator"), _IteratorMaker):
        loader._get_iterator = _IteratorMaker(loader, {})


def loader_position(loader: Any) -> dict[str, Any]:
    """Return a loader's position as plain values and tensors; before an iteration, the restored position or {}."""
    _check_samplers(loader)
    prepare_loader(loader)
    maker: _IteratorMaker = loader._get_iterator
    if loader._iterator is None:
        return maker.place
    if maker.source is not None and getattr(loader._iterator, "made_by", None) is not maker:
        raise SettingsError(
            "a StatefulDataLoader was iterated over before the State had it, so its exact position is unknown: give "
            "it to the State first"
        )
    state = loader.state_dict()
    if any(map(_only_counts, _dataset_states(state))):
        raise SettingsError(
            f"a StatefulDataLoader of {type(loader.dataset).__name__}, which has no state_dict, cannot be resumed "
            "twice: torchdata then leaves samples out. Give the dataset state_dict() and load_state_dict()"
        )
    generator = loader.generator if _draws_order(loader) else None
    return {"form": _FORM, "state": state, "generator": None if generator is None else generator.get_state()}


def resume_loader(loader: Any, place: dict[str, Any]) -> None:
    """Have the next iteration of a `StatefulDataLoader` resume at a position."""
    maker = _IteratorMaker(loader, place)
    if place and maker.source is not None and place.get("form") != _FORM:
        raise SettingsError(
            "an earlier version of EDL saved the position of the StatefulDataLoader, and this version cannot resume "
            "there exactly: finish the job with that version, or start a new one"
        )
    vars(loader).pop("_get_iterator", None)
    loader.load_state_dict(place.get("state", {}))
    loader._iterator = None
    loader._get_iterator = maker
    # In an unfinished epoch, the iterator is made only on request, so that `set_epoch` can be called first.
    if place.get("state", {}).get("_iterator_finished"):
        loader._iterator = maker()


_FORM: Final = 2  # of a position; in form 1, torchdata iterated over streams and samplers directly


class _IteratorMaker:
    """Stands in for a loader's method, to give torchdata a `_Source` and to make the iterator of an interrupted epoch.

    `source` is the loader's stream, or its sampler if the sampler has a state. `place` is the position at which to
    resume; {} if there is none.
    """

    def __init__(self, loader: Any, place: dict[str, Any]) -> None:
        self._loader = weakref.ref(loader)  # a cycle would keep worker processes after the loader is dropped
        self.place = place
        if isinstance(loader.dataset, IterableDataset):
            inner = None if isinstance(loader.dataset, IterDataPipe) else loader.dataset
        else:
            inner = next(filter(has_state, (loader.batch_sampler, loader.sampler)), None)
        self.source = None if inner is None else _Source(inner)

    def __call__(self) -> Any:
        loader: Any = self._loader()
        place, self.place = self.place, {}
        drawn = torch.get_rng_state()
        finished = place.get("state", {}).get("_iterator_finished")
        if finished and self.source is not None and _is_hugging_face(self.source.inner):
            # Its place is before the end, and would count only in an epoch with the same number.
            place["state"]["_steps_since_snapshot"] = 0
            for worker in _dataset_states(place["state"]):
                worker["fetcher_state"]["dataset_iter_state"]["ended"] = True
        swapped = self._swaps(loader)
        own = {name: vars(loader)[name] for name in swapped}
        vars(loader).update(swapped)  # bypasses DataLoader's check against changes; they end with this block
        try:
            iterator = type(loader)._get_iterator(loader)
        finally:
            vars(loader).update(own)
        iterator.made_by = self
        if place:
            if finished:
                collections.deque(iterator, maxlen=0)
            torch.set_rng_state(drawn)
            if place["generator"] is not None:
                loader.generator.set_state(place["generator"])
        return iterator

    def _swaps(self, loader: Any) -> dict[str, Any]:
        """Return the loader's attributes that are replaced while an iterator is made."""
        source = self.source
        if source is None:
            return {}
        if source.inner is loader.dataset:
            return {"dataset": source, "worker_init_fn": _WorkerInit(loader.worker_init_fn)}
        if source.inner is loader.batch_sampler:
            return {"batch_sampler": source}
        if loader.batch_sampler is None:
            return {"sampler": source}
        batches = copy.copy(loader.batch_sampler)
        batches.sampler = source
        return {"batch_sampler": batches}


class _WorkerInit:
    """Runs first in a worker process: shows the script its dataset, not a `_Source`, and calls its `worker_init_fn`."""

    def __init__(self, function: Callable[[int], object] | None) -> None:
        self._function = function

    def __call__(self, worker_id: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.inner)  # bypasses its check against changes
        if self._function is not None:
            self._function(worker_id)


_END: Final = object()


class _Source:
    """A stream or sampler as torchdata sees it, for all epochs of a process.

    `seen` says whether the source has yielded a sample in any process. `first` is a reader's state after the first read
    since the restart, or `_END`. It is compared with the state after the first read of the next epoch.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.seen = False
        self.first: Any = None

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> _Reader:
        return _Reader(self)

    def load_end(self, state: Any) -> None:
        """Load a state with which an epoch ended, so that the next epoch starts from the beginning of the data."""
        drawn = capture_random_states()
        _load_copy(self.inner, state)
        if next(iter(self.inner), _END) is _END:
            self.first = _END
        else:
            _load_copy(self.inner, state)
        restore_random_states(drawn)


class _Reader:
    """Reads a `_Source` for one epoch. Reading begins when the first sample is requested."""

    def __init__(self, source: _Source) -> None:
        self._source = source
        self._iterator: Any = None
        self._loaded: dict[str, Any] | None = None  # the restored state, until something is read
        self._read = False
        self._ended = False

    def __iter__(self) -> _Reader:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        resumed = self._iterator is not None
        if not resumed:
            self._iterator = iter(self._source.inner)
        sample = next(self._iterator, _END)
        self._ended = sample is _END
        self._source.seen |= not self._ended
        if not self._read:
            self._finish_first_read(resumed)
        if self._ended:
            raise StopIteration
        return sample

    def _finish_first_read(self, resumed: bool) -> None:
        """Check that the source does not begin every epoch at the place where an epoch was resumed."""
        source, loaded = self._source, self._loaded
        self._read, self._loaded = True, None
        if not resumed and source.first is None:
            return
        first = _END if self._ended else self.state_dict()
        if resumed:
            source.first = None if _equal(first, loaded) else first
            if _is_hugging_face(source.inner):
                source.inner.load_state_dict({})  # it would keep the place for all epochs
        elif source.seen and _equal(first, source.first):
            raise SettingsError(
                f"after a restart, {type(source.inner).__name__} begins every epoch where the restarted one resumed: "
                "let its load_state_dict() affect only the next iteration, or call its set_epoch()"
            )
        else:
            source.first = None

    def state_dict(self) -> dict[str, Any]:
        """Return a state for `load_state_dict`. It is a copy, because torchdata sends it to another process later."""
        if self._loaded is not None:
            return self._loaded
        source, iterator = self._source, self._iterator
        own = None if iterator is source.inner else _state_of(source.inner)
        state = {"source": own, "iterator": _state_of(iterator), "begun": iterator is not None}
        state |= {"ended": self._ended, "seen": source.seen}
        return copy.deepcopy(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        source = self._source
        inner = source.inner
        self._loaded, self._ended, source.seen = state, state["ended"], state["seen"]
        own = state["source"]
        if self._ended or not state["begun"]:
            own = state["iterator"] if own is None and has_state(inner) else own
            if not (own is None or _is_hugging_face(inner) or _equal(own, _state_of(inner))):
                source.load_end(own)
            return
        if _is_hugging_face(inner) and own.get("epoch", inner.epoch) != inner.epoch:
            raise SettingsError(
                f"the position in the data is in epoch {own['epoch']}, but the dataset is in epoch {inner.epoch}: call "
                f"its set_epoch({own['epoch']}) after restore(), before iterating over the loader"
            )
        if own is not None:
            _load_copy(inner, own)
        self._iterator = iter(inner)
        if state["iterator"] is not None:
            _load_copy(self._iterator, state["iterator"])


def has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _state_of(value: Any) -> Any:
    return value.state_dict() if has_state(value) else None


def _load_copy(value: Any, state: Any) -> None:
    value.load_state_dict(copy.deepcopy(state))


def _equal(state: Any, other: Any) -> bool:
    try:
        return bool(state == other)
    except (RuntimeError, ValueError):  # they contain arrays
        return False


def _is_hugging_face(dataset: Any) -> bool:
    """Return whether the dataset is from `datasets`, which keeps one position for all epochs with the same number."""
    kind = getattr(sys.modules.get("datasets"), "IterableDataset", None)
    return kind is not None and isinstance(dataset, kind)


def _check_samplers(loader: Any) -> None:
    if loader.num_workers and not loader.in_order:
        raise SettingsError("a StatefulDataLoader with in_order=False has no exact position: use in_order=True")
    inner = getattr(loader.batch_sampler, "sampler", None)
    for sampler in (loader.batch_sampler, loader.sampler, inner):
        if getattr(sampler, "keeps_place", False):
            raise SettingsError(
                f"a StatefulDataLoader reads ahead of training, so with {type(sampler).__name__} only the sampler "
                "knows the position: give the State the sampler, not the loader"
            )
        stateless = not hasattr(sampler, "state_dict")
        if stateless and isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
            raise SettingsError(
                f"torch's {type(sampler).__name__} shuffles differently after a restart: give the StatefulDataLoader "
                "shuffle=True, or a sampler with state_dict() and load_state_dict(), or use ElasticSampler"
            )
    if loader.batch_size is None and has_state(inner) and not has_state(loader.batch_sampler):
        raise SettingsError(
            f"a StatefulDataLoader does not keep the state of {type(inner).__name__} inside another batch_sampler: "
            "give it sampler= and batch_size= instead"
        )


def _draws_order(loader: Any) -> bool:
    """Return whether an epoch's order is drawn at its start, from the generator that also draws the loader's seeds."""
    module = sys.modules["torchdata.stateful_dataloader.sampler"]
    sampler = loader.sampler
    return (
        loader.generator is not None
        and isinstance(sampler, module.RandomSampler)
        and sampler.generator is loader.generator
        and not sampler.replacement
    )


def _dataset_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the dataset's parts of a loader's state: one, or one per worker process."""
    if "_snapshot" not in state:
        return [state]
    return [worker for worker in state["_snapshot"]["_worker_snapshots"].values() if worker]


def _only_counts(state: dict[str, Any]) -> bool:
    """Return whether the position in a stream is only a count of batches."""
    reader = (state.get("fetcher_state") or {}).get("dataset_iter_state")
    if state.get("fetcher_state") is None or (reader and not reader.get("begun", True)):
        return False
    return not reader or (reader.get("source") is None and reader.get("iterator") is None)
