"""The load of the `reader` benchmark: what crosses between a student and a teacher of no cost."""

from __future__ import annotations

__all__ = ["CLASSES", "DTYPES", "IMAGE", "KEEP_MEMORY", "ROTATION", "ROWS", "request_nbytes"]

ROWS = 32
IMAGE = (3, 224, 224)
CLASSES = 1000
DTYPES = {"uint8": 1, "float32": 4}
ROTATION = 4
"""So many prebuilt batches take turns, since a trainer does not send the same array over and over."""

KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""Environment that lets glibc keep freed memory; every peer gets it, as EDL gives it to itself (`edl.memory`)."""


def request_nbytes(dtype: str) -> int:
    """Bytes of the images of one request."""
    channels, height, width = IMAGE
    return ROWS * channels * height * width * DTYPES[dtype]
