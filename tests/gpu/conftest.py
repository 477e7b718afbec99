"""What the GPU checks share: the device, and the words with which they are skipped.

A check takes `device` if it means something on a CPU as well, where it runs with a small model, and `gpu` if it does
not. Both need PyTorch and nothing that has to be downloaded.
"""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(180))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The first GPU, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="session")
def gpu(device: torch.device) -> torch.device:
    """The first GPU; skips the test where there is none."""
    if device.type != "cuda":
        pytest.skip(f"no CUDA device: torch {torch.__version__} finds none")
    return device
