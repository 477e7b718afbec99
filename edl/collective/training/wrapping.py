"""How a module averages gradients: by itself (DDP, FSDP), or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from edl.collective.unwrapping import layers
from edl.errors import SettingsError

__all__ = [
    "averages_itself",
    "check_averaged",
    "check_wrapping",
    "fails_with_one_row",
    "in_lockstep",
    "is_sharded",
    "least_rows",
    "without_averaging",
]


def check_wrapping(module: nn.Module, group: dist.ProcessGroup | None, *, accumulates: bool) -> None:
    """Refuse a module whose gradients would be averaged twice, in part, or over other ranks than `group`.

    Args:
        module: as the user wrapped it.
        group: the process group of the ranks, torch's default group if None.
        accumulates: a step may have several micro-batches.

    Raises:
        SettingsError: it is such a module; the message says what to wrap.
    """
    own = layers(module)
    inside = [part for part in module.modules() if all(part is not layer for layer in own)]
    if any(isinstance(part, DistributedDataParallel) for part in inside):
        raise SettingsError(
            "a part of the model is wrapped in DistributedDataParallel, which would average its gradients once more: "
            "wrap the whole model, and give ElasticTrainer what comes of it"
        )
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in inside):
        raise SettingsError("FullyShardedDataParallel is not supported: use torch.distributed.fsdp.fully_shard")
    whole = any(isinstance(part, FSDPModule) for part in own)
    if not whole and any(isinstance(part, DTensor) for part in module.parameters()):
        raise SettingsError(
            "parts of the model are sharded, but not by fully_shard of the whole, which averages what is in none of "
            "them: call fully_shard(model), too, after its parts"
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and not _is_sharded_over(parameter, _ranks(group)):
            raise SettingsError(
                f"{name} is sharded over {parameter.device_mesh}, {list(parameter.placements)}; ElasticTrainer "
                "averages gradients over all ranks of its group, each with data of its own: shard over a mesh "
                "of just these (fully_shard, or HSDP over all of them). Tensor, pipeline and context parallelism are "
                "not supported"
            )
    for part in own:
        if not isinstance(part, DistributedDataParallel):
            continue
        if part.static_graph and accumulates:
            raise SettingsError(
                "DistributedDataParallel(static_graph=True) fails where a step has several micro-batches: leave out "
                "static_graph, or max_micro_batch, AdaScale and auto"
            )
        if _ranks(part.process_group) != _ranks(group):
            raise SettingsError(
                "DistributedDataParallel averages over other ranks than ElasticTrainer counts: pass both the same group"
            )


def check_averaged(updated: Iterable[Tensor], parameters: Iterable[Tensor]) -> None:
    """Refuse an optimizer that updates what is no parameter of the module.

    Args:
        updated: the optimizer's parameters.
        parameters: of the module.

    Raises:
        SettingsError: it does.
    """
    strangers = set(map(id, updated)) - set(map(id, parameters))
    if strangers:
        raise SettingsError(
            f"the optimizer has {len(strangers)} parameters that the model has not: nobody averages them. Make it "
            "after fully_shard, and give ElasticTrainer a module that holds all of them, such as an nn.ModuleList"
        )


def averages_itself(module: nn.Module) -> bool:
    """Return whether the backward of a module averages gradients over the ranks, so that all ranks need it."""
    return any(isinstance(part, (DistributedDataParallel, FSDPModule)) for part in layers(module))


def is_sharded(module: nn.Module) -> bool:
    """Return whether parts of a module are on other ranks."""
    return any(isinstance(part, FSDPModule) for part in module.modules())


def in_lockstep(module: nn.Module) -> bool:
    """Return whether the forward of a module waits for other ranks, so that all must run as many micro-batches."""
    return any(isinstance(part, (FSDPModule, nn.SyncBatchNorm)) for part in module.modules())


def least_rows(module: nn.Module) -> int:
    """Return how many rows a micro-batch should have: two where a module normalizes by the rank's own variance."""
    return 2 if any(map(_is_local_norm, module.modules())) else 1


def fails_with_one_row(module: nn.Module) -> bool:
    """Return whether a module normalizes rows without further dimensions, so that a single row has no variance.

    Images have pixels to take it over: with BatchNorm2d a single row is a poor estimate, and no error.
    """
    return any(
        _is_local_norm(part) and not isinstance(part, (nn.BatchNorm2d, nn.BatchNorm3d)) for part in module.modules()
    )


def _is_local_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm)


@contextmanager
def without_averaging(module: nn.Module) -> Iterator[None]:
    """Let forward and backward passes in the block only accumulate gradients on this rank."""
    for part in layers(module):
        if isinstance(part, DistributedDataParallel):
            with part.no_sync():
                yield
            return
        if isinstance(part, FSDPModule):
            part.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                part.set_requires_gradient_sync(True)
            return
    yield


def _is_sharded_over(parameter: DTensor, ranks: list[int]) -> bool:
    """Return whether a parameter is as `fully_shard` makes it over these ranks: sharded over all, or HSDP.

    `fully_shard` of what is parallel in another way adds its dimension in front: (Shard, ...), and never (Replicate,
    Shard), which is HSDP's.
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    if sorted(mesh.mesh.flatten().tolist()) != sorted(ranks):
        return False
    return mesh.ndim == 1 or (mesh.ndim == 2 and placements[0].is_replicate() and placements[1].is_shard())


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)
