"""The load of the `reader` and `degradation` benchmarks: what crosses between a student and a teacher of no cost."""

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
"""So many prebuilt batches take turns, since a trainer does not send the same array over and over."""

VOCABULARY = 2000
TOP_K = 64
SEQUENCES = 8
"""Of a batch of texts, which is padded to the longest."""
SHORTEST, LONGEST = 96, 160
MAX_TOKENS = SEQUENCES * LONGEST
"""Of a batch, so that a request has all of its tokens."""

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


def likeliest_of(ids: Any) -> Any:
    """The token that `TokenSleeper` says follows a token."""
    return (ids * 7 + 1) % VOCABULARY
