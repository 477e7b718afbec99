"""What a training loop must know of how its module averages gradients: by itself (DDP, FSDP), or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

__all__ = ["averages_itself", "in_lockstep", "is_sharded", "without_averaging"]


def averages_itself(module: nn.Module) -> bool:
    """Whether the backward of `module` averages gradients over the ranks, so that every rank needs one."""
    return isinstance(_uncompiled(module), (DistributedDataParallel, FSDPModule))


def is_sharded(module: nn.Module) -> bool:
    """Whether parts of `module` live on other ranks."""
    return any(isinstance(one, FSDPModule) for one in module.modules())


def in_lockstep(module: nn.Module) -> bool:
    """Whether the forward of `module` waits for the other ranks, so that all must run as many micro-batches."""
    return any(isinstance(one, (FSDPModule, nn.SyncBatchNorm)) for one in module.modules())


@contextmanager
def without_averaging(module: nn.Module) -> Iterator[None]:
    """Forward and backward passes in the block only accumulate gradients on this rank."""
    module = _uncompiled(module)
    if isinstance(module, DistributedDataParallel):
        with module.no_sync():
            yield
    elif isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)
    else:
        yield


def _uncompiled(module: nn.Module) -> nn.Module:
    """What `torch.compile` was given."""
    return getattr(module, "_orig_mod", module)
