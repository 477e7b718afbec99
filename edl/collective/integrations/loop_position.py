"""Saves the position of another library's training loop, and resumes there: the common part of the integrations.

A state is saved where a step begins, when everything that follows the previous step (logging, evaluation, the library's
own checkpoints) has been done. Random number generators are restored at the same point, not when the rest of the state
is restored, because reading the data again draws random numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from edl.collective.checkpoint.checkpointer import Checkpointer
from edl.collective.checkpoint.state.loaders import capture_random_states, restore_random_states
from edl.collective.checkpoint.state.state import State
from edl.errors import SettingsError
from edl.settings import read


class BoundaryCheckpointer:
    """Saves a `State` where a step begins, and once more at the end."""

    _opened: ClassVar[bool] = False  # whether a loop of this process has already begun with the job's saved state

    def __init__(self, options: dict[str, Any]) -> None:
        """Create a checkpointer, without opening it; `options` are those of the `Checkpointer`."""
        self._options = options
        self._stack = ExitStack()
        self._checkpointer: Checkpointer | None = None
        self._rng: dict[str, Any] | None = None
        self._stepped = False
        self._ended = False

    @property
    def is_open(self) -> bool:
        return self._checkpointer is not None

    @classmethod
    def begin_loop(cls, options: dict[str, Any]) -> None:
        """Refuse a second training loop, which would continue from the end of the first loop."""
        kept = [options.get("storage"), read("EDL_CHECKPOINT", str), read("EDL_SLOTS", str)]
        shared = "slots" not in options and any(kept)
        if shared and cls._opened:
            raise SettingsError(
                "a job keeps the state of one training loop, and this script begins a second one, which would "
                "continue from the end of the first: give the second loop its own job (another script, --rdzv-id and "
                "--checkpoint)"
            )
        cls._opened |= shared

    def open(self, state: State) -> bool:
        """Restore the newest state, if there is one. Returns whether a state was restored."""
        self.begin_loop(self._options)
        self._checkpointer = self._stack.enter_context(Checkpointer(state, **self._options))
        restored = self._checkpointer.restore() >= 0
        self._rng = capture_random_states() if restored else None
        return restored

    def begin_step(self, last: int) -> None:
        """Save the state after step `last` if that step was counted, and pause if the agent asks for a pause."""
        if self._rng is not None:
            restore_random_states(self._rng)
            self._rng = None
        if self._stepped and self._checkpointer is not None:
            self._stepped = False
            self._checkpointer.save(last)

    def count_step(self) -> None:
        self._stepped = True

    def save_end(self, last: int) -> None:
        if self._checkpointer is not None:
            self._stepped = False
            self._checkpointer.save(last, force=True)
            self._ended = True

    def close(self) -> None:
        """Release the memory, without another save."""
        if self._checkpointer is not None and not self._ended:
            self._checkpointer.close()  # or its `__exit__` would save objects that a failed step has half changed
        self._checkpointer = None
        self._stack.close()


def check_samples(saved: int, here: int, workers: int, remedy: str) -> None:
    if saved != here:
        raise SettingsError(
            f"a step trained {saved} samples, but trains {here} with {workers} workers: samples would be repeated or "
            f"left out. {remedy}"
        )


def check_order(saved: Any, here: Any) -> None:
    if saved != here:
        raise SettingsError(
            f"the data was read in the order of {saved}, but would continue in that of {here}: use the same "
            "dataset, sampler and seed"
        )


def make_workers_without_a_draw(loader: Any) -> None:
    """Prevent a loader that creates its persistent workers again after a restart from drawing their seed again."""
    base = getattr(loader, "base_dataloader", loader)  # inside Accelerate's wrapper, if there is one
    if not _keeps_workers(base):
        return

    def make_iterator() -> Any:
        del base._get_iterator  # from here on, the class's own method again
        own = base.generator
        base.generator = torch.Generator()  # only the seed comes from here; the sampler already has its generator
        base.generator.set_state((torch.default_generator if own is None else own).get_state())
        try:
            return base._get_iterator()
        finally:
            base.generator = own

    base._get_iterator = make_iterator


def has_workers(loader: Any) -> bool:
    """Return whether a loader has created persistent workers, here or before a restart."""
    base = getattr(loader, "base_dataloader", loader)
    return _keeps_workers(base) and (base._iterator is not None or "_get_iterator" in vars(base))


def _keeps_workers(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers


def order_of(loader: Any, *, redrawn: bool = False) -> dict[str, Any]:
    """Return what the order of the data depends on.

    A loader that is not a `DataLoader` must yield the same batches from the beginning in every iteration. With
    `redrawn`, random number generators are restored to their states at the beginning of the epoch, so the order may be
    drawn from them.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return {"sampler": type(getattr(loader, "dataset", loader)).__name__}
    batches: Any = copy.copy(loader.batch_sampler)
    sampler: Any = (
        loader.sampler if batches is None else getattr(getattr(batches, "batch_sampler", batches), "sampler", batches)
    )
    if getattr(sampler, "keeps_place", False):
        raise SettingsError(
            f"{type(sampler).__name__} counts the samples that were trained, but this trainer does not update it: "
            "remove it, since the position in the data is saved anyway"
        )
    # These draw the order once per epoch, from torch's generator or their own.
    drawn = isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
    if not (_is_function_of_epoch(sampler) or (redrawn and drawn)):
        raise SettingsError(
            f"{type(sampler).__name__} orders the data differently after a restart: use the trainer's own random or "
            "sequential order, or a sampler whose order depends on its seed and set_epoch() alone"
        )
    samples: Any = loader.dataset
    seed = getattr(sampler, "initial_seed", getattr(sampler, "seed", None))
    return {"sampler": type(sampler).__name__, "samples": len(samples), "seed": seed}


def _is_function_of_epoch(sampler: Any) -> bool:
    """Return whether the order depends on the epoch alone, and not on random numbers drawn elsewhere."""
    inner = getattr(getattr(sampler, "dataset", None), "_sampler", None)  # Lightning's DistributedSamplerWrapper
    if inner is not None:
        return _is_function_of_epoch(inner)
    known = isinstance(sampler, SequentialSampler | DistributedSampler)
    return known or hasattr(sampler, "initial_seed") or hasattr(sampler, "set_epoch")


class _Skipping:
    """Passes on an epoch's indices except the first `count`, which are drawn but skipped. Later epochs are complete."""

    def __init__(self, inner: Any, count: int) -> None:
        self._inner = inner
        self._count = count
        self._iterator: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # such as `set_epoch` and nested samplers

    def __iter__(self) -> Iterator[Any]:
        # A loader with workers asks for two iterators, and reads the second.
        self._iterator = iter(self._inner)
        return self._pass_on(self._iterator)

    def _pass_on(self, iterator: Iterator[Any]) -> Iterator[Any]:
        self.skip()
        yield from iterator

    def skip(self) -> None:
        """Skip the indices, unless they were skipped already."""
        assert self._iterator is not None
        while self._count:
            self._count -= 1
            next(self._iterator, None)


@contextmanager
def skipping(loader: DataLoader[Any], count: int) -> Iterator[None]:
    """Make the iterator created in the block skip `count` batches without loading them; random numbers are drawn."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    inner = getattr(loader, name)
    wrapper = _Skipping(inner, count)
    vars(loader)[name] = wrapper  # bypasses DataLoader's check against changes; they end with this block
    try:
        yield
        if count:
            wrapper.skip()
    finally:
        vars(loader)[name] = inner
