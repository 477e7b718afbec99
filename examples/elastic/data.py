"""Images by class, as one array that every worker maps and none has to load."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class Images(Dataset[tuple[Tensor, Tensor]]):
    """The images of `FOLDER/PART/CLASS/*.jpg` (or .png), all of one size, or scikit-learn's digits for "digits".

    The first process that wants a folder decodes it, into two .npy files beside the classes; workers that start later,
    after a failure for instance, only map them.

    Args:
        source: the folder, or "digits".
        part: "train" or "test".
    """

    def __init__(self, source: str, part: str) -> None:
        self.images, self.labels = _digits(part) if source == "digits" else _folder(Path(source), part)
        self.classes = int(self.labels.max()) + 1

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """An image, float32 [3, height, width] around 0, and its class."""
        pixels = torch.from_numpy(self.images[index].astype(np.float32)).permute(2, 0, 1)
        return pixels / 127.5 - 1, torch.tensor(int(self.labels[index]))


def _digits(part: str) -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.repeat((digits.images * 255 / 16).astype(np.uint8)[..., None], 3, axis=3)
    last = 300
    chosen = slice(last, None) if part == "train" else slice(0, last)
    return images[chosen], digits.target[chosen]


def _folder(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    images, labels = folder / f"{part}-images.npy", folder / f"{part}-labels.npy"
    if not labels.exists():
        _decode(folder / part, images, labels)
    return np.load(images, mmap_mode="r"), np.load(labels)


def _decode(folder: Path, images: Path, labels: Path) -> None:
    from PIL import Image

    classes = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if not classes:
        raise SystemExit(f"{folder} has no folder for each class: wanted are {folder}/CLASS/*.jpg")
    files = [(path, number) for number, name in enumerate(classes) for path in sorted((folder / name).iterdir())]
    pixels = np.stack([np.asarray(Image.open(path).convert("RGB")) for path, _ in files])
    for path, array in ((images, pixels), (labels, np.array([number for _, number in files]))):
        unfinished = path.with_suffix(f".{os.getpid()}.npy")
        np.save(unfinished, array)
        unfinished.rename(path)  # others see the whole file or none
