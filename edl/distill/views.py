"""Augmented views that come again: each a function of a sample's id and a number, so that soft labels can be kept.

Student and teacher see the same view of an image, which makes the teacher's label right for just these pixels
("consistent teaching": Beyer et al., "Knowledge distillation: A good teacher is patient and consistent", 2022). With m
views of a sample, the labels of all are kept after m epochs, as in FKD (Shen and Xing, "A Fast Knowledge Distillation
Framework for Visual Recognition", 2021) and DataCompDR (Vasu et al., "MobileCLIP", 2024). These store each crop's
parameters beside its label; here a seed, derived from the id and the view's number, stands for them, and nothing is
stored.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from edl.errors import SettingsError
from edl.settings import is_count

__all__ = ["AugmentedViews", "view_id", "view_seed"]

logger = logging.getLogger("edl.distill")

_MOST_VIEWS = 1 << 16  # 65,536 epochs; more would leave fewer bits for the ids of samples
_MOST_ID = 1 << 47  # so that an id and the number of a view fit into 64 bits
_PLAIN = (int, float, complex, str, bytes, type(None))
_CHECKED = 8  # first samples whose view is made twice: most augmentations change all of them
_CHECKED_LATER = 256  # later, one in this many is checked (0.4 %), since some augmentations change few samples


class _Samples(Protocol):
    def __getitem__(self, index: int, /) -> Any: ...

    def __len__(self) -> int: ...


def view_seed(sample_id: int | str, view: int, seed: int = 0) -> int:
    """Return the seed of a view: the same on every machine, in every process and version.

    The first 8 bytes, as a little-endian number, of BLAKE2b (RFC 7693) with a digest of 16 bytes over the UTF-8 text
    `edl-view-1/{seed}/{view}/int/{sample_id}`, or `…/str/…` where the id is a string.

    Args:
        sample_id: Id of the sample.
        view: Number of the view, from 0.
        seed: Number that distinguishes runs with other augmentations of the same samples.

    Raises:
        SettingsError: The id or the number is invalid.
    """
    sample_id = _checked_id(sample_id)
    text = f"edl-view-1/{int(seed)}/{_checked_view(view)}/{type(sample_id).__name__}/{sample_id}"
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little")


def view_id(sample_id: int | str, view: int) -> int | str:
    """Return the id under which the label of a view is cached.

    For an integer it is 65536 times the sample's id plus the view's number; for a string, the string, `#` and the
    number. It does not depend on the number of views.

    Args:
        sample_id: Id of the sample.
        view: Number of the view, from 0.

    Raises:
        SettingsError: The id or the number is invalid.
    """
    sample_id = _checked_id(sample_id)
    view = _checked_view(view)
    return f"{sample_id}#{view}" if isinstance(sample_id, str) else sample_id * _MOST_VIEWS + view


class AugmentedViews(Dataset[Any]):
    """A data set of which each sample has `views` views, one an epoch; each comes with its id, and is always the same.

    ::

        data = AugmentedViews(ImageFolder("train", transform=augmentation), views=4)
        loader = DataLoader(data, batch_size=256, shuffle=True, num_workers=8)
        labelled = distill(loader, "teacher", inputs={"image": 0}, outputs="logits", cache=cache, ids=-1)
        for epoch in range(epochs):
            data.set_epoch(epoch)
            for (images, labels, view_ids), logits in labelled:
                ...

    `dataset[index]` is called with the random numbers of Python, numpy and PyTorch (on the CPU) seeded by `view_seed`,
    and their state is restored afterwards. So all randomness in it, including transforms, depends only on the sample
    and the view, not on the order, the epoch, or the number of a loader's workers.

    A sample that is a tuple or list comes as a tuple with the view's id behind; a mapping has it as "view_id"; any
    other comes as (sample, id).

    Args:
        dataset: Data set that augments its samples itself; it needs `__getitem__` and a length.
        views: Number of views of each sample, up to 65536. You can add more later; the first ones stay the same.
        seed: Another number gives other views of the same samples. Like the augmentation, it then belongs into the
            cache's `dataset` tag.
        ids: Ids of the samples by index, integers or strings, if an index may later mean another sample; None to use
            the index.
        reseed: Function that is called with the view's seed, for augmentations with their own random numbers, such as
            `transform.set_random_seed` of albumentations.

    Attributes:
        dataset: The data set, as given.
        views: The number of views, as given.

    Raises:
        SettingsError: An argument is invalid. Also raised when a sample is read, if its augmentation is found to differ
            with the same seed: the first 8 samples of a process, and later one in 256, are made twice.
    """

    def __init__(
        self,
        dataset: _Samples,
        views: int,
        *,
        seed: int = 0,
        ids: Sequence[int | str] | None = None,
        reseed: Callable[[int], object] | None = None,
    ) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise SettingsError(
                f"a data set of type {type(dataset).__name__} has no samples by index: views need __getitem__ and a "
                "length"
            )
        if not is_count(views) or views > _MOST_VIEWS:
            raise SettingsError(f"views={views!r}: must be a whole number from 1 to {_MOST_VIEWS}")
        if ids is not None and len(ids) != len(dataset):
            raise SettingsError(f"{len(ids)} ids for a data set of {len(dataset)} samples")
        self.dataset = dataset
        self.views = views
        self._seed = seed
        self._ids = ids
        self._reseed = reseed
        self._view = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]  # also workers that live on see it change
        self._made = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the view of the next epoch, `epoch` modulo `views`; before the loader is iterated.

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
        sample_id = self._sample_id(index)
        view = int(self._view)
        number = view_seed(sample_id, view, self._seed)
        sample = self._seeded(index, number)
        self._made += 1
        if self._made <= _CHECKED or not self._made % _CHECKED_LATER:
            unknown: set[str] = set()
            same = _same(sample, self._seeded(index, number), unknown)
            if self._made == 1 and unknown:
                logger.warning(
                    "samples hold values of type %s, which cannot be compared: whether they are the same if made again "
                    "is not checked",
                    ", ".join(sorted(unknown)),
                )
            if not same:
                raise SettingsError(
                    f"sample {index} is not the same when it is made again with the same seed, so labels of its views "
                    "cannot be kept: its augmentation draws random numbers that neither random, numpy.random nor torch "
                    "(on the CPU) gives; name what seeds them with reseed="
                )
        return _with_id(sample, view_id(sample_id, view))

    def _sample_id(self, index: int) -> int | str:
        at = range(len(self.dataset))[index]  # -1 is the last sample's index as well
        return at if self._ids is None else self._ids[at]

    def _seeded(self, index: int, number: int) -> Any:
        with _seeded_random(number):
            if self._reseed is not None:
                self._reseed(number)
            return self.dataset[index]


@contextlib.contextmanager
def _seeded_random(number: int) -> Iterator[None]:
    """Seed the random numbers of Python, numpy and PyTorch on the CPU; afterwards they go on as before."""
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


def _same(first: Any, second: Any, unknown: set[str]) -> bool:
    """Return whether two samples are equal; types that cannot tell are added to `unknown`."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first.shape == second.shape and bool(torch.equal(first.nan_to_num(), second.nan_to_num()))
    if isinstance(first, np.ndarray):
        return bool(first.shape == second.shape and first.tobytes() == second.tobytes())
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_same(value, second[key], unknown) for key, value in first.items())
    if isinstance(first, tuple | list):
        return len(first) == len(second) and all(_same(*pair, unknown) for pair in zip(first, second, strict=True))
    if hasattr(first, "tobytes"):  # Pillow's pictures, numpy's numbers
        return bool(first.tobytes() == second.tobytes())
    if isinstance(first, _PLAIN):
        return bool(first == second or first != first)
    unknown.add(type(first).__qualname__)
    return True


def _checked_id(sample_id: Any) -> int | str:
    if isinstance(sample_id, np.integer):
        sample_id = int(sample_id)
    elif isinstance(sample_id, str):
        sample_id = str(sample_id)
    if isinstance(sample_id, bool) or not isinstance(sample_id, int | str):
        raise SettingsError(f"sample id {sample_id!r}: must be an integer or a string")
    if isinstance(sample_id, int) and not 0 <= sample_id < _MOST_ID:
        raise SettingsError(f"sample id {sample_id}: integers must be from 0 to {_MOST_ID - 1}; name others by strings")
    return sample_id


def _checked_view(view: Any) -> int:
    if isinstance(view, bool) or not isinstance(view, int | np.integer) or not 0 <= view < _MOST_VIEWS:
        raise SettingsError(f"view={view!r}: must be a whole number from 0 to {_MOST_VIEWS - 1}")
    return int(view)
