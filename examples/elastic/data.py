"""Images by class, in one array that every worker maps into memory instead of loading it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class Images(Dataset[tuple[Tensor, Tensor]]):
    """The images in `FOLDER/PART/CLASS/*.jpg` (or .png), all of one size, or scikit-learn's digits for "digits".

    The first process that uses a folder decodes its images into two .npy files in ~/.cache/edl-examples (or
    $XDG_CACHE_HOME). Workers that start later, for instance after a failure, only map these files.

    Args:
        source: The folder, or "digits".
        part: "train" or "test".
    """

    def __init__(self, source: str, part: str) -> None:
        self.images, self.labels = _digits(part) if source == "digits" else _folder(Path(source), part)
        self.classes = int(self.labels.max()) + 1

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image, float32 [3, height, width] centred on 0, and its class."""
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
    classes = sorted(path for path in (folder / part).glob("*") if path.is_dir())
    if not classes:
        raise SystemExit(f"{folder / part} has no folder for each class: expected {folder / part}/CLASS/*.jpg")
    # Adding or removing a file changes the modification time of its folder.
    seen = [str(folder.resolve()), part, *(f"{path.name} {path.stat().st_mtime_ns}" for path in classes)]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "edl-examples")
    cache.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256("\n".join(seen).encode()).hexdigest()[:16]
    images, labels = cache / f"{name}-images.npy", cache / f"{name}-labels.npy"
    if not labels.exists():
        _decode(classes, images, labels)
    return np.load(images, mmap_mode="r"), np.load(labels)


def _decode(classes: list[Path], images: Path, labels: Path) -> None:
    from PIL import Image

    files = [(path, number) for number, folder in enumerate(classes) for path in sorted(folder.iterdir())]
    pixels = np.stack([np.asarray(Image.open(path).convert("RGB")) for path, _ in files])
    for path, array in ((images, pixels), (labels, np.array([number for _, number in files]))):
        unfinished = path.with_suffix(f".{os.getpid()}.npy")
        np.save(unfinished, array)
        unfinished.rename(path)  # other processes see the whole file or none
