"""The world size, the rank of this process, and numbers that ranks exchange between two steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from edl.errors import SettingsError
from edl.settings import read

__all__ = ["exchange", "rank_of", "world_of"]


def world_of(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks in the group, or 1 without a process group.

    Args:
        group: The process group; None is torch's default group.

    Raises:
        SettingsError: There is no process group, although there are other workers: each would train by itself.
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
    """Return the rank of this process in the group, or 0 without a process group.

    Args:
        group: The process group; None is torch's default group.
    """
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def exchange(numbers: Sequence[int], group: dist.ProcessGroup | None, device: torch.device) -> list[list[int]]:
    """Exchange numbers among all ranks. This is a collective: every rank must call it with equally many numbers.

    Args:
        numbers: This rank's numbers.
        group: The process group; None is torch's default group.
        device: A device that the group's backend can send from.

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
