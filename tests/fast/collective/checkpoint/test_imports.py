"""A save while another thread is just importing what the state might hold."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from edl.collective.checkpoint.state.stateful_loader import is_stateful_loader
from edl.collective.checkpoint.state.tensors import is_sharded


@pytest.mark.parametrize(
    ("module", "is_instance"),
    [("torch.distributed.tensor", is_sharded), ("torchdata.stateful_dataloader", is_stateful_loader)],
)
def test_half_imported_module_has_no_value(
    monkeypatch: pytest.MonkeyPatch, module: str, is_instance: Callable[[object], bool]
) -> None:
    monkeypatch.setitem(sys.modules, module, ModuleType(module))  # as it is before its first line has run
    assert not is_instance(torch.ones(1))
