"""The order of the data: every sample once an epoch, with any number of ranks that may change meanwhile.

The order of an epoch is a function of the seed and the epoch alone. It is cut into global batches, of which a rank
takes its share. So the batches that are trained are the same for every world size, and a number says how far an epoch
has come: how many samples of its order *were trained*. It is advanced by the training loop after each
step, not by iteration: a `DataLoader`'s workers and `edl.distill` read several batches ahead, and what was read ahead
but not trained when a worker died must come again.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from edl.collective.ranks import rank_of, world_of
from edl.collective.training.split import Tail, batch_size_at, batches_left, rank_share
from edl.errors import ProtocolError, SettingsError

__all__ = ["ElasticSampler"]

logger = logging.getLogger("edl.collective")

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
