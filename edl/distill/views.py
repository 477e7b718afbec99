"""Repeatable augmented views: each depends only on a sample's id and a number, so that soft labels can be cached.

Student and teacher see the same view of an image, so the teacher's label is for exactly the pixels that the student
sees ("consistent teaching": Beyer et al., "Knowledge distillation: A good teacher is patient and consistent", 2022).
FKD (Shen and Xing, "A Fast Knowledge Distillation Framework for Visual Recognition", 2021) and DataCompDR (Vasu et al.,
"MobileCLIP", 2024) store each crop's parameters with its label; here, a seed derived from the id and the view's number
replaces these parameters.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from edl.errors import SettingsError
from edl.settings import is_count

__all__ = ["AugmentedViews", "view_id", "view_seed"]

_MOST_VIEWS = 1 << 16  # 65,536 epochs; more would leave fewer bits for sample ids
_MOST_ID = 1 << 47  # so that an id and a view's number fit into 64 bits
_PLAIN = (int, float, complex, str, bytes, type(None))
_CHECKED = 8  # first samples whose view is computed twice: most augmentations change all of them
_CHECKED_LATER = 256  # later, one in this many is checked (0.4 %), since some augmentations change few samples


def view_seed(sample_id: int | str, view: int, seed: int = 0) -> int:
    """Return the seed of a view: the same on every machine, in every process and version.

    It is the first 8 bytes, as a little-endian number, of a 16-byte BLAKE2b digest (RFC 7693) of the UTF-8 text
    `edl-view-1/{seed}/{view}/int/{sample_id}`, or `…/str/…` if the id is a string.

    Args:
        sample_id: Id of the sample.
        view: Number of the view, from 0.
        seed: Number that distinguishes runs with different augmentations of the same samples.

    Raises:
        SettingsError: The id is invalid.
    """
    sample_id = _checked_id(sample_id)
    text = f"edl-view-1/{int(seed)}/{int(view)}/{type(sample_id).__name__}/{sample_id}"
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little")


def view_id(sample_id: int | str, view: int) -> int | str:
    """Return the id under which the label of a view is cached.

    For an integer, this is 65536 times the sample's id, plus the view's number; for a string, it is the string followed
    by `#` and the number. The id does not depend on the number of views.

    Args:
        sample_id: Id of the sample.
        view: Number of the view, from 0.

    Raises:
        SettingsError: The id or the number is invalid.
    """
    sample_id = _checked_id(sample_id)
    if not 0 <= view < _MOST_VIEWS:
        raise SettingsError(f"view={view!r}: must be a whole number from 0 to {_MOST_VIEWS - 1}")
    return f"{sample_id}#{view}" if isinstance(sample_id, str) else sample_id * _MOST_VIEWS + int(view)


class AugmentedViews(Dataset[Any]):
    """A data set with `views` views of each sample, one per epoch. Each view has an id and is always the same.

    ::

        data = AugmentedViews(ImageFolder("train", transform=augmentation), views=4)
        loader = DataLoader(data, batch_size=256, shuffle=True, num_workers=8)
        labelled = distill(loader, "teacher", inputs={"image": 0}, outputs="logits", cache=cache, ids=-1)
        for epoch in range(epochs):
            data.set_epoch(epoch)
            for (images, labels, view_ids), logits in labelled:
                ...

    `dataset[index]` is called with the random generators of Python, numpy and PyTorch (on the CPU) seeded by
    `view_seed`; their state is restored afterwards. So all randomness in the data set and its transforms depends only
    on the sample and the view, not on the order, the epoch, or a loader's number of workers.

    A tuple or list becomes a tuple with the view's id appended; a mapping gets the key "view_id"; any other sample
    becomes (sample, id).

    Args:
        dataset: Data set that augments its own samples; it needs `__getitem__` and a length.
        views: Number of views of each sample, up to 65536. You can add more views later; the first views stay the same.
        seed: A different number gives different views of the same samples. The cache's `dataset` tag should include the
            seed, as well as the augmentation.
        ids: Ids of the samples by index, integers or strings, in case an index may later refer to a different sample;
            None to use the index.
        reseed: Function to call with the view's seed, for augmentations with their own random generator, such as
            `transform.set_random_seed` of albumentations.

    Attributes:
        dataset: The data set, as given.
        views: The number of views, as given.

    Raises:
        SettingsError: An argument is invalid. Also raised when a sample is read, if its augmentation differs between
            two computations with the same seed: the first 8 samples of a process, and later one sample in 256, are
            computed twice.
    """

    def __init__(
        self,
        dataset: Any,
        views: int,
        *,
        seed: int = 0,
        ids: Sequence[int | str] | None = None,
        reseed: Callable[[int], object] | None = None,
    ) -> None:
        if not is_count(views) or views > _MOST_VIEWS:
            raise SettingsError(f"views={views!r}: must be a whole number from 1 to {_MOST_VIEWS}")
        if ids is not None and len(ids) != len(dataset):
            raise SettingsError(f"{len(ids)} ids for a data set of {len(dataset)} samples")
        self.dataset = dataset
        self.views = views
        self._seed = seed
        self._ids = ids
        self._reseed = reseed
        self._view = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]  # persistent workers see it change too
        self._made = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the view of the next epoch to `epoch` modulo `views`; call this before iterating the loader.

        Args:
            epoch: Number of the epoch, from 0.

        Raises:
            SettingsError: The number is invalid.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise SettingsError(f"epoch={epoch!r}: must be a whole number of at least 0")
        self._view.fill_(epoch % self.views)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        at = range(len(self.dataset))[index]  # -1 is also the last sample's index
        sample_id = at if self._ids is None else self._ids[at]
        view = int(self._view)
        number = view_seed(sample_id, view, self._seed)
        sample = self._seeded(index, number)
        self._made += 1
        is_checked = self._made <= _CHECKED or not self._made % _CHECKED_LATER
        if is_checked and not _same(sample, self._seeded(index, number)):
            raise SettingsError(
                f"sample {index} differs when computed again with the same seed, so labels of its views cannot be "
                "cached: its augmentation draws random numbers outside random, numpy.random and torch (on the CPU); "
                "pass the function that seeds them as reseed="
            )
        return _with_id(sample, view_id(sample_id, view))

    def _seeded(self, index: int, number: int) -> Any:
        with _seeded_random(number):
            if self._reseed is not None:
                self._reseed(number)
            return self.dataset[index]


@contextlib.contextmanager
def _seeded_random(number: int) -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(number)
    np.random.seed([number & 0xFFFFFFFF, number >> 32])
    torch.default_generator.manual_seed(number)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _with_id(sample: Any, number: int | str) -> Any:
    if isinstance(sample, Mapping):
        return {**sample, "view_id": number}
    return (*sample, number) if isinstance(sample, tuple | list) else (sample, number)


def _same(first: Any, second: Any) -> bool:
    """Return whether two samples are equal, as far as their types can be compared."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first.shape == second.shape and bool(torch.equal(first.nan_to_num(), second.nan_to_num()))
    if isinstance(first, np.ndarray):
        return bool(first.shape == second.shape and first.tobytes() == second.tobytes())
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_same(value, second[key]) for key, value in first.items())
    if isinstance(first, tuple | list):
        return len(first) == len(second) and all(map(_same, first, second))
    if hasattr(first, "tobytes"):  # Pillow images, numpy scalars
        return bool(first.tobytes() == second.tobytes())
    return not isinstance(first, _PLAIN) or bool(first == second or first != first)


def _checked_id(sample_id: Any) -> int | str:
    sample_id = int(sample_id) if isinstance(sample_id, np.integer) else sample_id
    if isinstance(sample_id, bool) or not isinstance(sample_id, int | str):
        raise SettingsError(f"sample id {sample_id!r}: must be an integer or a string")
    if isinstance(sample_id, int) and not 0 <= sample_id < _MOST_ID:
        raise SettingsError(f"sample id {sample_id}: integers must be from 0 to {_MOST_ID - 1}; use strings for others")
    return str(sample_id) if isinstance(sample_id, str) else sample_id  # numpy's strings have another type
