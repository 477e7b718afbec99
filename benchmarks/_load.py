"""The load of the `reader` and `degradation` benchmarks: what a student exchanges with a teacher of no cost."""

from __future__ import annotations

from typing import Any

__all__ = [
    "CLASSES",
    "DTYPES",
    "IMAGE",
    "KEEP_MEMORY",
    "LONGEST",
    "MAX_TOKENS",
    "ROTATION",
    "ROWS",
    "SEQUENCES",
    "SHORTEST",
    "TOP_K",
    "VOCABULARY",
    "likeliest_of",
    "request_nbytes",
]

ROWS = 32
IMAGE = (3, 224, 224)
CLASSES = 1000
DTYPES = {"uint8": 1, "float32": 4}
ROTATION = 4
"""Number of prebuilt batches that take turns, since a trainer does not send the same array repeatedly."""

VOCABULARY = 2000
TOP_K = 64
SEQUENCES = 8
"""Texts in a batch, which is padded to the longest."""
SHORTEST, LONGEST = 96, 160
MAX_TOKENS = SEQUENCES * LONGEST
"""Most tokens in a batch, so that one request has room for all of them."""

KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""Environment in which glibc keeps freed memory. Every peer gets it, since EDL does the same (`edl.memory`)."""


def request_nbytes(dtype: str) -> int:
    """Return the bytes of the images in one request."""
    channels, height, width = IMAGE
    return ROWS * channels * height * width * DTYPES[dtype]


def likeliest_of(ids: Any) -> Any:
    """Return the token that `TokenSleeper` predicts after each token."""
    return (ids * 7 + 1) % VOCABULARY
