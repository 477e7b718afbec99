"""The order of the data: every sample once an epoch, with any number of ranks that may change meanwhile.

The order of an epoch is a function of the seed and the epoch alone. It is cut into global batches, of which a rank
takes its share. So the batches that are trained are the same for every world size, and a number says how far an epoch
has come: how many samples of its order *were trained*. It is advanced by the training loop after each
step, not by iteration: a `DataLoader`'s workers and `edl.distill` read several batches ahead, and what was read ahead
but not trained when a worker died must come again.

Where a global batch begins and ends does not depend on how many ranks there are, so a world of any size trains the same
batches in the same order.

A batch is what a training loop has: tensors, arrays, lists, and nests of these. Tuples, named tuples and mappings are
structures of parts; so is a list that holds a tensor, an array or a structure, as `DataLoader` makes of a tuple.
Everything else with a length that can be sliced has rows: tensors, arrays, lists of strings, top-k soft labels. Parts
without a length (a number, None) go to every micro-batch as they are.
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

__all__ = [
    "ElasticSampler",
    "Tail",
    "batch_size_at",
    "batches_left",
    "count_rows",
    "cut_rows",
    "micro_batch_sizes",
    "rank_share",
]

logger = logging.getLogger("edl.collective")


B = TypeVar("B")

Tail: TypeAlias = Literal["keep", "drop", "pad"]
"""What happens to the samples at the end of an epoch that do not fill a global batch: they make a smaller one, they are
left out, or they are filled up with samples from the beginning of the epoch's order."""


def batch_size_at(position: int, length: int, batch: int, tail: Tail) -> int:
    """Return the samples of the global batch that begins at a position; 0 if there is none.

    Args:
        position: in samples of the epoch.
        length: samples of the epoch.
        batch: samples of a full global batch.
        tail: what happens to the end of the epoch.
    """
    left = length - position
    if left <= 0:
        return 0
    if tail == "keep":
        return min(batch, left)
    return batch if tail == "pad" or left >= batch else 0


def batches_left(position: int, length: int, batch: int, tail: Tail) -> int:
    """Return how many global batches begin at a position or after it, all full but for the tail.

    Args:
        position: in samples of the epoch.
        length: samples of the epoch.
        batch: samples of a full global batch.
        tail: what happens to the end of the epoch.
    """
    left = max(length - position, 0)
    return left // batch if tail == "drop" else -(-left // batch)


def rank_share(samples: int, world: int, rank: int, least: int = 1) -> range:
    """Return the places in a global batch that a rank trains.

    Shares are neighbours in the order of ranks and differ by a sample at most; the first ranks have the larger shares.
    With fewer samples than `least` for every rank the last ranks' shares are empty.

    Args:
        samples: of the global batch.
        world: the number of ranks.
        rank: whose share it is.
        least: samples that a share has, unless it is empty or the batch has fewer.

    Raises:
        SettingsError: there is no such rank.
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
    """Cut a share into as few micro-batches as possible; if not empty, they differ by a sample at most.

    Args:
        samples: of the share.
        most: that fit into the memory at once; None for no limit.
        parts: make at least so many micro-batches. If these are more than the samples allow, some are of 0 samples.
        least: samples of a micro-batch that is not empty, where `most` allows it.

    Returns:
        The sizes, the largest first; empty without a sample, unless `parts` is above 1.

    Raises:
        SettingsError: `most` is below 1.
    """
    if most is not None and most < 1:
        raise SettingsError(f"max_micro_batch={most}: must be at least 1, or None for no limit")
    needed = -(-samples // most) if most is not None else min(samples, 1)
    count = max(needed, parts if parts > 1 else 0)
    filled = max(needed, min(count, samples // least))
    quotient, more = divmod(samples, filled) if filled else (0, 0)
    return [quotient + (place < more) for place in range(filled)] + [0] * (count - filled)


def count_rows(batch: object) -> int:
    """Return how many rows every part of a batch has.

    Args:
        batch: tensors, or a nest of them.

    Raises:
        SettingsError: the parts differ, or none has rows.
    """
    counts: list[int] = []
    _map(batch, lambda part: counts.append(len(part)))
    if not counts:
        raise SettingsError(f"a batch of type {type(batch).__name__} has no part with rows, such as a tensor")
    if len(set(counts)) > 1:
        raise SettingsError(f"the parts of a batch have {sorted(set(counts))} rows: each needs one for each sample")
    return counts[0]


def cut_rows(batch: B, begin: int, end: int) -> B:
    """Return some rows of every part of a batch, as views where the parts allow it.

    Args:
        batch: tensors, or a nest of them.
        begin: the first row.
        end: behind the last row.
    """
    cut: B = _map(batch, lambda part: part[begin:end])
    return cut


def _map(part: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(part, Mapping):
        return {key: _map(value, change) for key, value in part.items()}
    if isinstance(part, tuple):
        mapped = [_map(value, change) for value in part]
        return type(part)(*mapped) if hasattr(part, "_fields") else tuple(mapped)
    if isinstance(part, list) and any(_is_part(value) for value in part):
        return [_map(value, change) for value in part]
    has_rows = part.ndim > 0 if isinstance(part, (torch.Tensor, np.ndarray)) else _can_be_cut(part)
    return change(part) if has_rows else part


def _is_part(value: object) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray, Mapping, tuple, list))


def _can_be_cut(part: object) -> bool:
    return hasattr(part, "__len__") and hasattr(part, "__getitem__") and not isinstance(part, (str, bytes))


# --- The order of the data ---


_VERSION = 1  # of the state; another is refused


class ElasticSampler(Sampler[list[int]]):
    """A batch sampler whose state is (seed, epoch, samples trained), the same on every rank.

    ::

        sampler = ElasticSampler(len(dataset), global_batch=256, seed=0)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2, generator=torch.Generator())
        for epoch in sampler.epochs(90):
            for batch in loader:        # this rank's share of all global batches not trained yet
                ...
                sampler.advance()       # not with an `ElasticTrainer` that was given the sampler: its `step` does it

    A rank whose share is empty, since the last global batch has fewer samples than there are ranks, gets a sample
    that another rank trains, because a `DataLoader` cannot make a batch of none: `share_rows` is 0 then, and
    `ElasticTrainer` gives it no weight.

    Args:
        length: samples in the dataset.
        global_batch: samples of an optimizer step, over all ranks.
        seed: of the order.
        shuffle: False for the dataset's own order.
        tail: what happens to the last samples of an epoch, see `Tail`. Only "drop" leaves some of them out, only "pad"
            repeats some.
        rank: of this process. By default that of `torch.distributed` when an iteration begins, or 0 without it.
        world: the number of ranks, by default as `rank`, or 1.

    Raises:
        SettingsError: arguments contradict each other.
    """

    keeps_place = True
    """Counts what was trained by itself, whatever a loader has read ahead."""

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
            raise SettingsError("rank and world go together: pass both, or neither")
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        self.tail: Tail = tail
        self.epoch = self.consumed = 0
        self.asked = global_batch
        self._sizes = [(0, global_batch)]  # from which position of this epoch on which global batch
        self._fixed_place = None if rank is None or world is None else (rank, world)
        self._place = self._fixed_place or (0, 1)
        self._least = self._required = 1  # rows of a share: now, and from the next iteration on
        self._lock = threading.RLock()  # `edl.distill` and others may iterate in a thread of theirs
        self._handed = 0
        self._pass = 0
        self._passed = False
        self._order: tuple[int, npt.NDArray[np.int64], int] | None = None

    # --- What is trained. ---

    @property
    def global_batch(self) -> int:
        """Samples of the next optimizer step over all ranks, if it is not the last of an epoch."""
        return self._size_at(self.consumed)

    @property
    def batch_samples(self) -> int:
        """Samples of the next optimizer step over all ranks; 0 if the epoch is finished."""
        return batch_size_at(self.consumed, self.length, self.global_batch, self.tail)

    @property
    def share_rows(self) -> int:
        """Samples of the next optimizer step that this rank trains; its batch has `handed_rows` rows."""
        rank, world = self._place
        return len(rank_share(self.batch_samples, world, rank, self._least))

    @property
    def handed_rows(self) -> int:
        """Rows of this rank's next batch: its share or, if that is empty, as few as a model can take, often 1."""
        return self.share_rows or min(self._least, self.batch_samples)

    def require_rows(self, least: int) -> None:
        """Give no rank fewer than `least` rows from the next iteration on: batch normalization cannot train on a row.

        Where a global batch has too few samples for all ranks, the last ranks have none. `ElasticTrainer` calls this.
        Every rank must, with the same number.

        Args:
            least: rows.
        """
        with self._lock:
            self._required = least
            if not self._pass:  # nothing was read
                self._least = least

    @property
    def place(self) -> tuple[int, int]:
        """(rank, world): whose share of how many is handed out, since the present iteration began."""
        return self._place

    @property
    def mark(self) -> tuple[int, int, int]:
        """The pass, epoch and position of the next batch to train.

        It changes with an `advance`, a new iteration, a new epoch, and a restored state.
        """
        return self._pass, self.epoch, self.consumed

    @property
    def finished(self) -> bool:
        """Whether every sample of this epoch was trained."""
        return not self.batch_samples

    def advance(self) -> None:
        """Count the next global batch as trained, or as left out of this epoch, by all ranks.

        Raises:
            SettingsError: the epoch is finished.
        """
        with self._lock:
            samples = self.batch_samples
            if not samples:
                raise SettingsError(f"epoch {self.epoch} is finished: call set_epoch({self.epoch + 1}) before training")
            self.consumed += samples

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; if the state is in it already, it is resumed.

        Args:
            epoch: its number, from 0 on.
        """
        with self._lock:
            if epoch != self.epoch:
                self._sizes = [(0, self._sizes[-1][1])]
                self.epoch = epoch
                self.consumed = 0
                self._pass += 1
            self._passed = False

    def epochs(self, count: int) -> Iterator[int]:
        """Begin the epochs that are left, from the present epoch on.

        Args:
            count: of epochs in all.

        Yields:
            The number of an epoch that `set_epoch` has begun.
        """
        for epoch in range(self.epoch, count):
            self.set_epoch(epoch)
            yield epoch

    @contextmanager
    def hold(self) -> Iterator[int]:
        """Let no iteration read ahead during the block.

        Yields:
            The position up to which this rank has read, in samples of the epoch.
        """
        with self._lock:
            yield max(self._handed, self.consumed)

    def resize(self, global_batch: int, at: int) -> None:
        """Use another global batch from a position of this epoch on.

        Every rank must do this with the same numbers, and none may have read beyond `at`: agree on the largest of what
        `hold` gives while holding.

        Args:
            global_batch: samples of an optimizer step, over all ranks.
            at: the position, in samples of the epoch.

        Raises:
            SettingsError: `at` lies behind what was read already, or no epoch has so many samples.
        """
        if global_batch < 1 or (self.tail == "drop" and global_batch > self.length):
            raise SettingsError(f"global_batch={global_batch}: must be from 1 to the {self.length} samples of an epoch")
        with self.hold() as handed:
            if at < handed:
                raise SettingsError(f"cannot change the batch at sample {at}: {handed} were handed out already")
            self._sizes = [size for size in self._sizes if size[0] < at] + [(at, global_batch)]

    # --- Iteration. ---

    def __len__(self) -> int:
        """Return the number of global batches of this epoch that are not trained yet."""
        count, position = 0, self.consumed
        while position < self.length:
            end = next((at for at, _ in self._sizes if at > position), self.length)
            size = self._size_at(position)
            if end >= self.length:
                return count + batches_left(position, self.length, size, self.tail)
            steps = -(-(end - position) // size)
            count, position = count + steps, position + steps * size
        return count

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over this rank's shares of the global batches that are not trained yet, as indices.

        Raises:
            SettingsError: this epoch was passed through and is finished, so `set_epoch` was forgotten; or there are
                other workers and no process group yet.
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
                if number != self._pass:  # another pass began: this one must not move its position
                    return
                position = self._handed
                samples = batch_size_at(position, self.length, self._size_at(position), self.tail)
                if not samples:
                    self._handed = max(position, self.length)  # a smaller batch must not open this epoch again
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
                # Mixed rather than added, or epoch 1 of seed 0 would be epoch 0 of seed 1.
                mixed = int(np.random.SeedSequence((self.seed, self.epoch)).generate_state(1, np.uint64)[0])
                generator = torch.Generator().manual_seed(mixed)
                order = torch.randperm(self.length, generator=generator).numpy()
            else:
                order = np.arange(self.length, dtype=np.int64)
            self._order = (self.epoch, order, zlib.crc32(order.data))
        return self._order[1]

    # --- State. ---

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive: plain numbers, the same on every rank, none of them about ranks."""
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
        """Go on from a saved state, also with another world. Iterations under way end.

        A `global_batch` argument that differs from the state's is the user's wish, and holds from here on; otherwise
        the state's batch does, which `ElasticTrainer` may have changed.

        Args:
            state: as `state_dict` returned it.

        Raises:
            SettingsError: the state is of another dataset or seed: going on would repeat and leave out samples.
            ProtocolError: it cannot be read, or another version of PyTorch, which shuffled otherwise, wrote it.
        """
        if state.get("version") != _VERSION:
            raise ProtocolError(f"a sampler's state of version {state.get('version')!r}: this EDL reads {_VERSION}")
        if (state["length"], state["seed"]) != (self.length, self.seed):
            raise SettingsError(
                f"the state is of {state['length']} samples with seed {state['seed']}, the sampler of {self.length} "
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
                logger.info("global batch %s from here on, as asked for; it was %s", self.asked, self.global_batch)
                self._sizes = [size for size in self._sizes if size[0] < self.consumed] + [(self.consumed, self.asked)]
            self._indices()
            assert self._order is not None
            if self._order[2] != state["order_crc"]:
                raise ProtocolError(
                    f"the order of epoch {self.epoch} is not that of the state: shuffle={self.shuffle} is new, or "
                    "PyTorch is of another version. Restore what differs, or begin the epoch anew"
                )
