"""Whole numbers that ranks tell each other between two steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["exchange", "world_of"]


def world_of(group: dist.ProcessGroup | None) -> int:
    """How many ranks there are; 1 without `torch.distributed`."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def exchange(numbers: Sequence[int], group: dist.ProcessGroup | None, device: torch.device) -> list[list[int]]:
    """Every rank's numbers, by rank. All must call it with as many; `device` is one that the backend can send from."""
    world = world_of(group)
    if world == 1:
        return [list(numbers)]
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine, group=group)
    found: list[list[int]] = torch.stack(everyone).tolist()
    return found
