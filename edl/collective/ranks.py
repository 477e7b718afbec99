"""What ranks know of each other: how many there are, which one this is, numbers that they tell between two steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from edl.errors import SettingsError
from edl.settings import read

__all__ = ["exchange", "rank_of", "world_of"]


def world_of(group: dist.ProcessGroup | None) -> int:
    """Ranks in the group; 1 without a process group.

    Raises:
        SettingsError: there is none, but there are other workers: each would train, and go on, by itself.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(group)
    workers = read("WORLD_SIZE", int) or 1
    if workers > 1 and read("PADDLE_TRAINERS_NUM", str) is not None:
        raise SettingsError(
            f"one of {workers} trainers, but EDL knows of no others: import Checkpointer and PaddleState from "
            "edl.collective.paddle, not from edl.collective; where data is read before the Checkpointer is made, call "
            "init_parallel_env() of edl.collective.paddle, not of paddle.distributed"
        )
    if workers > 1:
        raise SettingsError(
            f"one of {workers} workers, but there is no process group: call init_process_group() before data is read, "
            "a step made, or a state restored or saved"
        )
    return 1


def rank_of(group: dist.ProcessGroup | None) -> int:
    """This rank in the group; 0 without a process group."""
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


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
