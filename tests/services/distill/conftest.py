"""The fixtures of the fast tests of the same area, and a Triton that a module's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fast.distill.conftest import register, serve, start
from tests.plugins_triton import TritonFactory, TritonServer

__all__ = ["register", "serve", "start"]


@pytest.fixture(scope="module")
def row_sums(triton: TritonFactory) -> Iterator[TritonServer]:
    """A Triton of model `teacher`, x:FP32[4] -> logits:FP32[10], which takes 20 rows in a request."""
    server = triton.start(max_batch=20)
    yield server
    server.stop()
