"""Images as uint8, the form in which they are sent to teachers: a quarter of the bytes of floats."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import torch
from nets import load_library, normalize
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset[tuple[Tensor, int]]):
    """Small images of one size, decoded once and then mapped: `FOLDER/PART/CLASS/*.jpg`, or scikit-learn's digits.

    Args:
        source: the folder, or "digits".
        part: "train" or "test". Training images are shifted by up to an eighth; if they come from a folder, they are
            also mirrored at random.
        count: Number of images to use, balanced over the classes; 0 for all.
    """

    def __init__(self, source: str, part: str, count: int = 0) -> None:
        self.images, self.labels = _digits(part) if source == "digits" else _folder(Path(source), part)
        self.classes, self.size = int(self.labels.max()) + 1, self.images.shape[1]
        self.augment, self.mirror = part == "train", source != "digits"
        # Take the first image of each class, then the second of each, and so on.
        rank = np.empty(len(self.labels), np.int64)
        for label in range(self.classes):
            (of_class,) = np.nonzero(self.labels == label)
            rank[of_class] = np.arange(len(of_class))
        self.chosen = np.argsort(rank, kind="stable")[: count or None]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image, uint8 [3, height, width], and its class."""
        chosen = self.chosen[index]
        pixels = self.images[chosen]
        if self.augment:
            pixels = _shift(pixels, *torch.randint(-(self.size // 8), self.size // 8 + 1, (2,)).tolist())
            if self.mirror and torch.rand(()) < 0.5:
                pixels = pixels[:, ::-1]
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))), int(self.labels[chosen])


def open_images(source: str, part: str, crop: int = 0, count: int = 0) -> Dataset[tuple[Tensor, int]]:
    """Open `Images`, or with `crop` torchvision's `ImageFolder`, which decodes images of any size in each epoch.

    Args:
        source: A folder with PART/CLASS/*.jpg, or "digits".
        part: "train" (random crops, mirrored at random) or "test" (the middle).
        crop: Height and width of the crop; 0 for small images of one size.
        count: Number of images to use; only without `crop`.

    Raises:
        ImportError: torchvision, which `crop` needs, is not installed or does not fit PyTorch.
    """
    if not crop:
        return Images(source, part, count)
    datasets, t = (load_library(f"torchvision.{name}", f"--crop {crop}") for name in ("datasets", "transforms"))
    train = [t.RandomResizedCrop(crop), t.RandomHorizontalFlip()]
    steps = train if part == "train" else [t.Resize(crop * 8 // 7), t.CenterCrop(crop)]
    return datasets.ImageFolder(Path(source, part), t.Compose([*steps, t.PILToTensor()]))


def class_count(images: Dataset[tuple[Tensor, int]]) -> int:
    """Return the number of classes."""
    classes = images.classes  # ImageFolder has their names
    return classes if isinstance(classes, int) else len(classes)


@torch.no_grad()
def accuracy_of(model: nn.Module, batches: DataLoader[tuple[Tensor, int]]) -> float:
    """Return the share of the images that the model classifies correctly."""
    device = next(model.parameters()).device
    was, hits, rows = model.training, 0, 0
    model.eval()
    for images, labels in batches:
        hits += int((model(normalize(images.to(device))).argmax(1).cpu() == labels).sum())
        rows += len(labels)
    model.train(was)
    return hits / rows


def _shift(pixels: np.ndarray, down: int, across: int) -> np.ndarray:
    height, width = pixels.shape[:2]
    moved = np.zeros_like(pixels)
    moved[max(down, 0) : height + down, max(across, 0) : width + across] = pixels[
        max(-down, 0) : height - down, max(-across, 0) : width - across
    ]
    return moved


def _digits(part: str) -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.repeat((digits.images * 255 / 16).astype(np.uint8)[..., None], 3, axis=3)
    chosen = slice(300, None) if part == "train" else slice(0, 300)
    return images[chosen], digits.target[chosen]


def _folder(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    classes = sorted(path for path in (folder / part).glob("*") if path.is_dir())
    if not classes:
        raise SystemExit(f"{folder / part} has no folder for each class: expected {folder / part}/CLASS/*.jpg")
    # Adding, removing or replacing a file changes these.
    seen = [str(folder.resolve()), part]
    for path in classes:
        facts = [entry.stat() for entry in os.scandir(path)]
        newest = max((fact.st_mtime_ns for fact in facts), default=0)
        seen.append(
            f"{path.name} {path.stat().st_mtime_ns} {len(facts)} {newest} {sum(fact.st_size for fact in facts)}"
        )
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
