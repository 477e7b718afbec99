"""What a training loop must know of how its module averages gradients: by itself (DDP, FSDP), or not at all."""

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
        accumulates: a step may have several micro-batches.

    Raises:
        SettingsError: it is such a one; the message says what to wrap.
    """
    own = layers(module)
    inside = [one for one in module.modules() if all(one is not layer for layer in own)]
    if any(isinstance(one, DistributedDataParallel) for one in inside):
        raise SettingsError(
            "a part of the model is wrapped in DistributedDataParallel, which would average its gradients once more: "
            "wrap the whole model, and give ElasticTrainer what comes of it"
        )
    if any(type(one).__name__ == "FullyShardedDataParallel" for one in inside):
        raise SettingsError("FullyShardedDataParallel is not supported: use torch.distributed.fsdp.fully_shard")
    whole = any(isinstance(one, FSDPModule) for one in own)
    if not whole and any(isinstance(one, DTensor) for one in module.parameters()):
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
    for one in own:
        if not isinstance(one, DistributedDataParallel):
            continue
        if one.static_graph and accumulates:
            raise SettingsError(
                "DistributedDataParallel(static_graph=True) fails where a step has several micro-batches: leave out "
                "static_graph, or max_micro_batch, AdaScale and auto"
            )
        if _ranks(one.process_group) != _ranks(group):
            raise SettingsError(
                "DistributedDataParallel averages over other ranks than ElasticTrainer counts: pass both the same group"
            )


def check_averaged(updated: Iterable[Tensor], parameters: Iterable[Tensor]) -> None:
    """Refuse an optimizer that updates what is not among the `parameters` of the module.

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
    """Whether the backward of `module` averages gradients over the ranks, so that every rank needs one."""
    return any(isinstance(one, (DistributedDataParallel, FSDPModule)) for one in layers(module))


def is_sharded(module: nn.Module) -> bool:
    """Whether parts of `module` live on other ranks."""
    return any(isinstance(one, FSDPModule) for one in module.modules())


def in_lockstep(module: nn.Module) -> bool:
    """Whether the forward of `module` waits for the other ranks, so that all must run as many micro-batches."""
    return any(isinstance(one, (FSDPModule, nn.SyncBatchNorm)) for one in module.modules())


def least_rows(module: nn.Module) -> int:
    """Return how many rows a micro-batch should have: two where `module` normalizes by the variance of one rank's."""
    return 2 if any(map(_is_local_norm, module.modules())) else 1


def fails_with_one_row(module: nn.Module) -> bool:
    """Return whether `module` normalizes rows without further dimensions, so that one row has no variance.

    Images have pixels to take it over: with BatchNorm2d one row is a poor estimate, and no error.
    """
    return any(
        _is_local_norm(one) and not isinstance(one, (nn.BatchNorm2d, nn.BatchNorm3d)) for one in module.modules()
    )


def _is_local_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm)


@contextmanager
def without_averaging(module: nn.Module) -> Iterator[None]:
    """Forward and backward passes in the block only accumulate gradients on this rank."""
    for one in layers(module):
        if isinstance(one, DistributedDataParallel):
            with one.no_sync():
                yield
            return
        if isinstance(one, FSDPModule):
            one.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                one.set_requires_gradient_sync(True)
            return
    yield


def _is_sharded_over(parameter: DTensor, ranks: list[int]) -> bool:
    """Whether a parameter is as `fully_shard` makes it over these ranks: sharded over all, or over replicas (HSDP).

    `fully_shard` of what is parallel in another way adds its dimension in front: (Shard, ...), and never (Replicate,
    Shard), which is HSDP's.
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    if sorted(mesh.mesh.flatten().tolist()) != sorted(ranks):
        return False
    return mesh.ndim == 1 or (mesh.ndim == 2 and placements[0].is_replicate() and placements[1].is_shard())


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Of all processes, those in the group."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)
