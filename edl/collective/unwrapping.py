"""Finds the module that a user wrote inside `DistributedDataParallel`, `DataParallel` and `torch.compile`."""

from __future__ import annotations

from torch import nn

from edl.errors import SettingsError

__all__ = ["layers", "unwrapped"]


def layers(module: nn.Module) -> list[nn.Module]:
    """Return a module with all that it wraps.

    Returns:
        The module as it was given, then what every wrapper wraps; the module that the user wrote is the last.

    Raises:
        SettingsError: it is wrapped in FSDP's first version, whose parts only that can name.
    """
    found = [module]
    while True:
        outer = found[-1]
        if isinstance(outer, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = outer.module
        else:
            inner = getattr(outer, "_orig_mod", None)  # what `torch.compile` was given
        if not isinstance(inner, nn.Module):
            break
        found.append(inner)
    if type(found[-1]).__name__ == "FullyShardedDataParallel":
        raise SettingsError("FullyShardedDataParallel is not supported: use torch.distributed.fsdp.fully_shard")
    return found


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that the user wrote.

    Raises:
        SettingsError: it is wrapped in FSDP's first version, whose parts only that can name.
    """
    return layers(module)[-1]
