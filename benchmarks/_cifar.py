"""CIFAR-10 images from a folder or archive of picture files: `train/CLASS/NAME.jpg` and `test/CLASS/NAME.jpg`."""

from __future__ import annotations

import io
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt
from PIL import Image

from benchmarks._child import ROOT

__all__ = ["Pictures", "find_pictures", "load_pictures"]

_BESIDE = ROOT.parent / "shared/data/cifar10.tar.gz"
_SUFFIXES = {".jpg", ".jpeg", ".png"}


@dataclass(frozen=True)
class Pictures:
    """The training or test part: `images` uint8 [n, 3, 32, 32] and their classes, int64 [n], in alternating classes."""

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]


def find_pictures(given: Path | None) -> Path:
    """Return the folder or `.tar.gz` to read: the given one, or the one beside the checkout.

    Raises:
        SystemExit: There is none.
    """
    path = given or _BESIDE
    if not path.exists():
        raise SystemExit(
            f"no CIFAR-10 images at {path}: pass --data with a folder or .tar.gz that holds train/CLASS/*.jpg and "
            "test/CLASS/*.jpg"
        )
    return path


def load_pictures(path: Path, train: int, test: int) -> tuple[Pictures, Pictures]:
    """Return the first `train` and `test` images, equally many of each class.

    Raises:
        SystemExit: There are fewer images.
    """
    names: dict[str, dict[str, list[bytes]]] = {"train": defaultdict(list), "test": defaultdict(list)}
    for part, kind, read in _files(path):
        wanted = train if part == "train" else test
        if len(names[part][kind]) < -(-wanted // 10):
            names[part][kind].append(read)
    return _decoded(path, names["train"], train), _decoded(path, names["test"], test)


def _files(path: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield (train or test, class, contents) of each picture, sorted by name within each folder."""
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.suffix.lower() in _SUFFIXES and file.parent.parent.name in ("train", "test"):
                yield file.parent.parent.name, file.parent.name, file.read_bytes()
        return
    with tarfile.open(path) as archive:
        for member in archive:
            name = PurePosixPath(member.name)
            if name.suffix.lower() in _SUFFIXES and len(name.parts) > 2 and name.parts[-3] in ("train", "test"):
                contents = archive.extractfile(member)
                if contents is not None:
                    yield name.parts[-3], name.parts[-2], contents.read()


def _decoded(path: Path, found: dict[str, list[bytes]], count: int) -> Pictures:
    kinds = sorted(found)
    if sum(len(files) for files in found.values()) < count:
        raise SystemExit(f"{path} holds fewer than {count} images of a part, or not equally many of each class")
    turns = [(label, place) for place in range(-(-count // len(kinds))) for label in range(len(kinds))][:count]
    images = np.stack([_pixels(found[kinds[label]][place]) for label, place in turns])
    return Pictures(images, np.array([label for label, _ in turns], dtype=np.int64))


def _pixels(contents: bytes) -> npt.NDArray[np.uint8]:
    with Image.open(io.BytesIO(contents)) as image:
        return np.asarray(image.convert("RGB").resize((32, 32)), dtype=np.uint8).transpose(2, 0, 1)
