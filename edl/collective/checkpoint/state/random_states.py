"""The states of the random number generators of this process, as plain values."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["capture_random_states", "restore_random_states"]


def capture_random_states() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators, and of CUDA's current device if CUDA is in use."""
    version, words, gauss = random.getstate()
    states = {
        "python": (version, np.array(words, np.uint32), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Put the generators back as `capture_random_states` found them."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
