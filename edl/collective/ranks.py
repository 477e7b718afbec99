"""The world size, the rank of this process, and numbers that ranks exchange between two steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from edl.errors import SettingsError
from edl.settings import read

__all__ = ["exchange", "rank_of", "world_of"]


def world_of(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks.

    Args:
        group: the process group, torch's default group if None.

    Returns:
        The ranks in the group; 1 without a process group.

    Raises:
        SettingsError: there is no group, but there are other workers: all would train, and go on, by themselves.
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
    """Return the rank of this process in the group; 0 without a process group.

    Args:
        group: the process group, torch's default group if None.
    """
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def exchange(numbers: Sequence[int], group: dist.ProcessGroup | None, device: torch.device) -> list[list[int]]:
    """Exchange numbers among all ranks. A collective: all ranks call it with as many numbers.

    Args:
        numbers: of this rank.
        group: the process group, torch's default group if None.
        device: from which the group's backend can send.

    Returns:
        The numbers of all ranks, by rank.
    """
    world = world_of(group)
    if world == 1:
        return [list(numbers)]
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine, group=group)
    found: list[list[int]] = torch.stack(everyone).tolist()
    return found
