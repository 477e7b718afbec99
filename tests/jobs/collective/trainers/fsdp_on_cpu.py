"""Accelerate's FSDP2 on CPUs, which it offers for accelerators only: that choice is replaced, the rest is its own."""

from __future__ import annotations

from typing import Any

from accelerate import DistributedType
from accelerate.state import AcceleratorState, PartialState


def allow_fsdp_on_cpu() -> None:
    """Have an `Accelerator` that is given an FSDP plugin shard over the ranks of a CPU job, in place of DDP."""
    choose = AcceleratorState.__init__

    def choose_fsdp(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        choose(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = choose_fsdp
