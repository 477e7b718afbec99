"""The world size, this process's rank, and exchanges between ranks: numbers, bytes and tensors, no pickled objects.

Except for those that send or receive, functions that communicate are collective. All of them wait for at most the
process group's timeout, and raise torch's own errors. `group` is None for torch's default group. Ranks are global
unless a function says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from edl.errors import SettingsError
from edl.settings import read

Group: TypeAlias = "dist.ProcessGroup | None"
_CHUNK_NBYTES = 32 << 20  # of a message: enough to keep any network busy, little for a GPU to hold


def world_of(group: Group) -> int:
    """Return the number of ranks in the group, or 1 without a process group.

    Raises:
        SettingsError: There is no process group although there are other workers: each worker would train by itself.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(group)
    trainers = read("PADDLE_TRAINERS_NUM", int)
    workers = read("WORLD_SIZE", int) or trainers or 1
    if workers > 1 and trainers is not None:
        raise SettingsError(
            f"this is one of {workers} trainers, but EDL knows of no others: import Checkpointer and PaddleState from "
            "edl.collective.paddle, not from edl.collective; if data is read before the Checkpointer is made, call "
            "init_parallel_env() of edl.collective.paddle, not of paddle.distributed"
        )
    if workers > 1:
        raise SettingsError(
            f"{workers} workers, but no process group: call init_process_group() before reading data, "
            "making a step, or restoring or saving a state"
        )
    return 1


def rank_of(group: Group) -> int:
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def exchange(numbers: Sequence[int], group: Group, device: torch.device) -> list[list[int]]:
    """Return the numbers of all ranks, in one list per rank. All ranks must pass lists of the same length."""
    world = world_of(group)
    if world == 1:
        return [list(numbers)]
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine, group=group)
    found: list[list[int]] = torch.stack(everyone).tolist()
    return found


def broadcast_tensor(tensor: torch.Tensor, src: int, group: Group = None) -> None:
    """Overwrite a contiguous tensor's bytes with those of rank `src`. Does nothing without a process group."""
    if not dist.is_initialized():
        return
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    device = _device(group)
    for begin in range(0, flat.numel(), _CHUNK_NBYTES):
        piece = flat[begin : begin + _CHUNK_NBYTES]
        moved = piece.to(device)
        dist.broadcast(moved, src, group)
        if moved.data_ptr() != piece.data_ptr():
            piece.copy_(moved)


def broadcast_bytes(data: bytes, src: int, group: Group = None) -> bytes:
    if not dist.is_initialized():
        return data
    length = torch.tensor([len(data)], device=_device(group))
    dist.broadcast(length, src, group)
    moved = byte_tensor(bytearray(data)) if dist.get_rank() == src else torch.empty(int(length), dtype=torch.uint8)
    broadcast_tensor(moved, src, group)
    return moved.numpy().tobytes()


def gather_bytes(data: bytes, group: Group = None) -> list[bytes]:
    device, size = _device(group), dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)], device=device), group)
    longest = max(int(length) for length in lengths)
    padded = byte_tensor(bytearray(data.ljust(longest, b"\0"))).to(device)
    gathered = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(gathered, padded, group)
    return [data.cpu()[: int(length)].numpy().tobytes() for data, length in zip(gathered, lengths, strict=True)]


def all_reduce_max(values: Sequence[int], group: Group = None) -> list[int]:
    moved = torch.tensor(values, dtype=torch.int64, device=_device(group))
    dist.all_reduce(moved, dist.ReduceOp.MAX, group)
    return [int(value) for value in moved.tolist()]


def global_rank(rank: int, group: Group = None) -> int:
    """Return the global rank of a rank in the group."""
    return rank if group is None else dist.get_global_rank(group, rank)


def send_bytes(data: bytes, dst: int, group: Group = None) -> None:
    dist.send(torch.tensor([len(data)], device=_device(group)), dst, group)
    send_tensor(byte_tensor(bytearray(data)), dst, group)


def receive_bytes(src: int, group: Group = None) -> bytes:
    length = torch.zeros(1, dtype=torch.int64, device=_device(group))
    dist.recv(length, src, group)
    data = torch.empty(int(length), dtype=torch.uint8)
    receive_tensor(data, src, group)
    return data.numpy().tobytes()


def send_tensor(data: torch.Tensor, dst: int, group: Group = None) -> None:
    """Send a flat uint8 tensor to another rank, which calls `receive_tensor` with a tensor of the same length."""
    for begin in range(0, data.numel(), _CHUNK_NBYTES):
        dist.send(data[begin : begin + _CHUNK_NBYTES].to(_device(group)), dst, group)


def receive_tensor(data: torch.Tensor, src: int, group: Group = None) -> None:
    """Fill a flat uint8 tensor with what rank `src` sends."""
    device = _device(group)
    for begin in range(0, data.numel(), _CHUNK_NBYTES):
        piece = data[begin : begin + _CHUNK_NBYTES]
        moved = piece if piece.device == device else torch.empty_like(piece, device=device)
        dist.recv(moved, src, group)
        if moved is not piece:
            piece.copy_(moved)


def byte_tensor(data: bytearray | memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)


def _device(group: Group) -> torch.device:
    """Return the device on which this group can send tensors."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
