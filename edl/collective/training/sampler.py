"""The order of the data: every sample once per epoch, even if the number of ranks changes during the epoch.

The order of an epoch depends on the seed and the epoch alone. The order is cut into global batches, independently of
the number of ranks, and each rank trains its share of each batch. So a single number records the progress in an epoch:
how many samples from its order *were trained*. The training loop advances this number after each step. Iteration
doesn't advance it, because loaders read several batches ahead.

A batch is whatever the training loop uses: tensors, arrays, lists, and nests of these. Tuples, named tuples and
mappings are structures that consist of parts. So is a list that contains a tensor, an array or a structure, because
`DataLoader` returns tuples as such lists. Anything else that has a length and can be sliced has rows. Parts without a
length (a number, None) go to every micro-batch unchanged.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from edl.collective.ranks import rank_of, world_of
from edl.errors import ProtocolError, SettingsError

logger = logging.getLogger("edl.collective")


B = TypeVar("B")

Tail: TypeAlias = Literal["keep", "drop", "pad"]
"""What happens to the samples that are left at the end of an epoch and do not fill a global batch. "keep" makes a
smaller batch, "drop" leaves them out, and "pad" fills the batch up with samples from the beginning of the epoch's
order."""


def batch_size_at(position: int, length: int, batch: int, tail: Tail) -> int:
    """Return the number of samples in the global batch that begins at `position`; 0 if there is none."""
    left = length - position
    if left <= 0:
        return 0
    if tail == "keep":
        return min(batch, left)
    return batch if tail == "pad" or left >= batch else 0


def rank_share(samples: int, world: int, rank: int, least: int = 1) -> range:
    """Return the positions, in a global batch of `samples` samples, of the samples that a rank trains on.

    Shares are consecutive, in the order of the ranks, and differ by at most one sample. A share has at least `least`
    samples unless it is empty or the whole batch has fewer samples. The last ranks' shares may be empty.
    """
    if not 0 <= rank < world:
        raise SettingsError(f"rank={rank} of world={world}: must be from 0 to {world - 1}")
    sharing = min(world, max(samples // least, 1))
    if rank >= sharing:
        return range(samples, samples)
    quotient, more = divmod(samples, sharing)
    begin = rank * quotient + min(rank, more)
    return range(begin, begin + quotient + (rank < more))


def micro_batch_sizes(samples: int, most: int | None = None, parts: int = 1, least: int = 1) -> list[int]:
    """Cut a share of `samples` samples into as few micro-batches as possible, as equal in size as possible.

    `most` is the number of samples that fit into memory at once. There are at least `parts` micro-batches; if there are
    too few samples for that, some micro-batches are empty. A micro-batch that is not empty has at least `least` samples
    if `most` allows it. Returns the sizes, the largest first.
    """
    if most is not None and most < 1:
        raise SettingsError(f"max_micro_batch={most}: must be at least 1, or None for no limit")
    needed = -(-samples // most) if most is not None else min(samples, 1)
    count = max(needed, parts if parts > 1 else 0)
    filled = max(needed, min(count, samples // least))
    quotient, more = divmod(samples, filled) if filled else (0, 0)
    return [quotient + (place < more) for place in range(filled)] + [0] * (count - filled)


def count_rows(batch: object) -> int:
    counts: list[int] = []
    _map(batch, lambda part: counts.append(len(part)))
    if not counts:
        raise SettingsError(f"a batch of type {type(batch).__name__} has no part with rows, such as a tensor")
    if len(set(counts)) > 1:
        raise SettingsError(f"the parts of a batch have {sorted(set(counts))} rows: each needs one per sample")
    return counts[0]


def cut_rows(batch: B, begin: int, end: int) -> B:
    """Return the rows from `begin` up to but not including `end` of every part of a batch, as views where possible."""
    cut: B = _map(batch, lambda part: part[begin:end])
    return cut


def _map(part: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(part, Mapping):
        return {key: _map(value, change) for key, value in part.items()}
    if isinstance(part, tuple):
        mapped = [_map(value, change) for value in part]
        return type(part)(*mapped) if hasattr(part, "_fields") else tuple(mapped)
    structures = (torch.Tensor, np.ndarray, Mapping, tuple, list)
    if isinstance(part, list) and any(isinstance(value, structures) for value in part):
        return [_map(value, change) for value in part]
    if isinstance(part, (torch.Tensor, np.ndarray)):
        return change(part) if part.ndim else part
    has_rows = hasattr(part, "__len__") and hasattr(part, "__getitem__") and not isinstance(part, (str, bytes))
    return change(part) if has_rows else part


_VERSION = 1  # of the saved state; any other version is refused


class ElasticSampler(Sampler[list[int]]):
    """Batch sampler that gives each rank its share of every global batch, and can resume with any number of ranks.

    ::

        sampler = ElasticSampler(len(dataset), global_batch=256, seed=0)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2, generator=torch.Generator())
        for epoch in sampler.epochs(90):
            for batch in loader:        # this rank's share of all global batches not trained yet
                ...
                sampler.advance()       # leave this out with an `ElasticTrainer` that has the sampler: `step` does it

    If the last global batch has fewer samples than there are ranks, some shares are empty. A rank with an empty share
    gets a sample that another rank trains, because a `DataLoader` cannot make an empty batch. `share_rows` is 0 then,
    and `ElasticTrainer` gives the sample no weight.

    Args:
        length: Number of samples in the dataset.
        global_batch: Samples per optimizer step, over all ranks.
        seed: Shuffle seed.
        shuffle: Whether to shuffle each epoch; False keeps the dataset's own order.
        tail: What happens to the last samples of an epoch, see `Tail`. Only "drop" leaves samples out, and only "pad"
            repeats samples.
        rank: Rank of this process. By default, the `torch.distributed` rank at the start of each iteration, or 0.
        world: Number of ranks. By default, the `torch.distributed` world size at the start of each iteration, or 1.

    Raises:
        SettingsError: An argument is out of range, or arguments contradict each other.
    """

    keeps_place = True
    """Tells `State` that this sampler counts trained samples itself, however far a loader has read ahead."""

    def __init__(
        self,
        length: int,
        *,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        tail: Tail = "keep",
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        if length < 1 or global_batch < 1:
            raise SettingsError(f"length={length}, global_batch={global_batch}: both must be at least 1")
        if seed < 0:
            raise SettingsError(f"seed={seed}: must not be negative")
        if tail not in ("keep", "drop", "pad"):
            raise SettingsError(f"tail={tail!r}: must be 'keep', 'drop' or 'pad'")
        if tail == "drop" and length < global_batch:
            raise SettingsError(f"tail='drop' leaves no batch: {length} samples, global_batch={global_batch}")
        if (rank is None) != (world is None):
            raise SettingsError("pass both rank and world, or neither")
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        self.tail: Tail = tail
        self.epoch = self.consumed = 0
        self.asked = global_batch
        self._sizes = [(0, global_batch)]  # (position in this epoch, global batch from there on)
        self._fixed_place = None if rank is None or world is None else (rank, world)
        self._place = self._fixed_place or (0, 1)
        self._least = self._required = 1  # fewest rows of a share: in this iteration, and from the next one on
        self._lock = threading.RLock()  # `edl.distill` and others may iterate in a thread of their own
        self._handed = 0
        self._pass = 0
        self._passed = False
        self._order: tuple[int, npt.NDArray[np.int64], int] | None = None

    @property
    def global_batch(self) -> int:
        """Samples in the next optimizer step over all ranks, unless that step is the last of an epoch."""
        return self._size_at(self.consumed)

    @property
    def batch_samples(self) -> int:
        """Samples in the next optimizer step over all ranks; 0 if the epoch is finished."""
        return batch_size_at(self.consumed, self.length, self.global_batch, self.tail)

    @property
    def share_rows(self) -> int:
        """Samples that this rank trains in the next optimizer step; its batch may have more rows, see `handed_rows`."""
        rank, world = self._place
        return len(rank_share(self.batch_samples, world, rank, self._least))

    @property
    def handed_rows(self) -> int:
        """Rows in this rank's next batch: its share or, if that is empty, the fewest rows that the model accepts."""
        return self.share_rows or min(self._least, self.batch_samples)

    def require_rows(self, least: int) -> None:
        """Give no rank fewer than `least` rows from the next iteration on. Batch normalization, for example, needs two.

        Every rank must call this with the same number. `ElasticTrainer` does.

        Args:
            least: The fewest rows of a share that is not empty.
        """
        with self._lock:
            self._required = least
            if not self._pass:  # nothing was read
                self._least = least

    @property
    def place(self) -> tuple[int, int]:
        """The (rank, world) whose shares the current iteration returns."""
        return self._place

    @property
    def mark(self) -> tuple[int, int, int]:
        """The pass, epoch and position of the next batch to train."""
        return self._pass, self.epoch, self.consumed

    @property
    def finished(self) -> bool:
        """Whether this epoch has no batch left to train."""
        return not self.batch_samples

    def advance(self) -> None:
        """Count the next global batch as trained by all ranks, or as left out of this epoch.

        Raises:
            SettingsError: The epoch is finished.
        """
        with self._lock:
            samples = self.batch_samples
            if not samples:
                raise SettingsError(f"epoch {self.epoch} is finished: call set_epoch({self.epoch + 1}) before training")
            self.consumed += samples

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, or resume it if the sampler is already within that epoch.

        Args:
            epoch: Number of the epoch, from 0.
        """
        with self._lock:
            if epoch != self.epoch:
                self._sizes = [(0, self._sizes[-1][1])]
                self.epoch = epoch
                self.consumed = 0
                self._pass += 1
            self._passed = False

    def epochs(self, count: int) -> Iterator[int]:
        """Begin each remaining epoch in turn, starting with the current one.

        Args:
            count: Total number of epochs, including those already trained.

        Yields:
            The number of an epoch that `set_epoch` has begun.
        """
        for epoch in range(self.epoch, count):
            self.set_epoch(epoch)
            yield epoch

    @contextmanager
    def hold(self) -> Iterator[int]:
        """Keep iterations from reading ahead during the block.

        Yields:
            The position up to which this rank has read, in samples of the epoch.
        """
        with self._lock:
            yield max(self._handed, self.consumed)

    def resize(self, global_batch: int, at: int) -> None:
        """Change the size of the global batch from a position in this epoch on.

        Every rank must call this with the same arguments. To agree on `at`, exchange the positions that `hold` yields
        and take the largest, while all ranks are still in `hold`.

        Args:
            global_batch: Samples per optimizer step, over all ranks.
            at: Position from which the new size applies, in samples of the epoch.

        Raises:
            SettingsError: Reading has already passed `at`, or `global_batch` is out of range.
        """
        if global_batch < 1 or (self.tail == "drop" and global_batch > self.length):
            raise SettingsError(f"global_batch={global_batch}: must be from 1 to the {self.length} samples of an epoch")
        with self.hold() as handed:
            if at < handed:
                raise SettingsError(f"cannot change the batch at sample {at}: {handed} samples were already handed out")
            self._sizes = [size for size in self._sizes if size[0] < at] + [(at, global_batch)]

    def __len__(self) -> int:
        """Return the number of global batches that have not been trained yet in this epoch."""
        count, position = 0, self.consumed
        while position < self.length:
            end = next((at for at, _ in self._sizes if at > position), self.length)
            size = self._size_at(position)
            if end >= self.length:
                left = max(self.length - position, 0)
                return count + (left // size if self.tail == "drop" else -(-left // size))
            steps = -(-(end - position) // size)
            count, position = count + steps, position + steps * size
        return count

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over this rank's shares of the global batches that are not trained yet, as lists of sample indices.

        Raises:
            SettingsError: The epoch was already finished, or there are several workers and no process group yet.
        """
        with self._lock:
            if self.finished and self._passed:
                raise SettingsError(
                    f"epoch {self.epoch} is finished: call set_epoch({self.epoch + 1}), or use epochs()"
                )
            self._passed = not self.finished
            self._place = self._fixed_place or (rank_of(None), world_of(None))
            self._least = self._required
            self._handed = self.consumed
            self._pass += 1
            order, number = self._indices(), self._pass
        return self._shares(order, number)

    def _shares(self, order: npt.NDArray[np.int64], number: int) -> Iterator[list[int]]:
        while True:
            with self._lock:
                if number != self._pass:  # a newer pass has begun: this one must not move its position
                    return
                position = self._handed
                samples = batch_size_at(position, self.length, self._size_at(position), self.tail)
                if not samples:
                    self._handed = max(position, self.length)  # so that a later, smaller batch cannot reopen this epoch
                    return
                rank, world = self._place
                mine = rank_share(samples, world, rank, self._least) or range(min(self._least, samples))
                self._handed += samples
            yield order[(position + np.arange(mine.start, mine.stop)) % self.length].tolist()

    def _size_at(self, position: int) -> int:
        return next(size for at, size in reversed(self._sizes) if at <= position)

    def _indices(self) -> npt.NDArray[np.int64]:
        if self._order is None or self._order[0] != self.epoch:
            if self.shuffle:
                # The seed and epoch are mixed, not added, or epoch 1 of seed 0 would be epoch 0 of seed 1.
                mixed = int(np.random.SeedSequence((self.seed, self.epoch)).generate_state(1, np.uint64)[0])
                generator = torch.Generator().manual_seed(mixed)
                order = torch.randperm(self.length, generator=generator).numpy()
            else:
                order = np.arange(self.length, dtype=np.int64)
            self._order = (self.epoch, order, zlib.crc32(order.data))
        return self._order[1]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers and lists. It is the same on all ranks, however many there are."""
        with self._lock:
            self._indices()
            assert self._order is not None
            return {
                "version": _VERSION,
                "seed": self.seed,
                "epoch": self.epoch,
                "consumed": self.consumed,
                "length": self.length,
                "asked": self.asked,
                "sizes": [list(size) for size in self._sizes],
                "order_crc": self._order[2],
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, in a world of any size. Iterations in progress end.

        The global batch keeps its saved size, including changes that `ElasticTrainer` made. But if this sampler's
        `global_batch` argument differs from the argument in the saved run, the new argument applies from here on.

        Args:
            state: A state that `state_dict` returned.

        Raises:
            SettingsError: The state is for a different dataset length or seed.
            ProtocolError: The state has an unknown version, or the epoch's order has changed.
        """
        if state.get("version") != _VERSION:
            raise ProtocolError(f"the sampler's state has version {state.get('version')!r}: this EDL reads {_VERSION}")
        if (state["length"], state["seed"]) != (self.length, self.seed):
            raise SettingsError(
                f"the state is for {state['length']} samples with seed {state['seed']}, the sampler for {self.length} "
                f"with seed {self.seed}: samples would be repeated or left out"
            )
        with self._lock:
            self.epoch = int(state["epoch"])
            self.consumed = int(state["consumed"])
            self._sizes = [(int(at), int(size)) for at, size in state["sizes"]]
            self._pass += 1
            self._handed = self.consumed
            self._passed = False
            if state["asked"] != self.asked:
                logger.info("global batch %s from here on, as requested; it was %s", self.asked, self.global_batch)
                self._sizes = [size for size in self._sizes if size[0] < self.consumed] + [(self.consumed, self.asked)]
            self._indices()
            assert self._order is not None
            if self._order[2] != state["order_crc"]:
                raise ProtocolError(
                    f"the order of epoch {self.epoch} differs from the saved one: shuffle={self.shuffle} or the "
                    "version of PyTorch is new. Restore the old setting or version, or start the epoch again"
                )
