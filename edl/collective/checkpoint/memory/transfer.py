"""Transfer of state between ranks over a process group, as bytes and tensors, never as pickled objects.

Every function that communicates is collective: the ranks involved must all call it, in the same order. The process
group's timeout limits how long it may wait, and a broken group raises torch's own errors. `group` is the process group,
None for the default group. Ranks are global unless a function says otherwise.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
import torch.distributed as dist

from edl.collective.checkpoint.encoding import from_json, to_json
from edl.collective.checkpoint.memory.slots import HEADER_NBYTES, SlotHeader, SlotPair

__all__ = [
    "Group",
    "all_reduce_max",
    "broadcast_bytes",
    "broadcast_tensor",
    "gather_bytes",
    "global_rank",
    "receive_slot",
    "send_slot",
    "slot_bytes",
]

Group = dist.ProcessGroup | None
_CHUNK_NBYTES = 32 << 20
"""Bytes of a message: enough to keep any network busy, and little compared to the state if a GPU has to hold them."""


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
    """Return rank `src`'s `data`, on every rank."""
    if not dist.is_initialized():
        return data
    length = torch.tensor([len(data)], device=_device(group))
    dist.broadcast(length, src, group)
    moved = _tensor_of(data) if dist.get_rank() == src else torch.empty(int(length), dtype=torch.uint8)
    broadcast_tensor(moved, src, group)
    return moved.numpy().tobytes()


def gather_bytes(data: bytes, group: Group = None) -> list[bytes]:
    """Return the `data` of all ranks, by rank in the group."""
    device, size = _device(group), dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)], device=device), group)
    longest = max(int(length) for length in lengths)
    padded = _tensor_of(data.ljust(longest, b"\0")).to(device)
    gathered = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(gathered, padded, group)
    return [data.cpu()[: int(length)].numpy().tobytes() for data, length in zip(gathered, lengths, strict=True)]


def all_reduce_max(values: Sequence[int], group: Group = None) -> list[int]:
    """Return the largest of all ranks' values, element by element."""
    moved = torch.tensor(values, dtype=torch.int64, device=_device(group))
    dist.all_reduce(moved, dist.ReduceOp.MAX, group)
    return [int(value) for value in moved.tolist()]


def global_rank(rank: int, group: Group = None) -> int:
    """Return the global rank, as the functions here expect it, of a rank in the group."""
    return rank if group is None else dist.get_global_rank(group, rank)


def send_slot(header: SlotHeader, meta: bytes, data: torch.Tensor, dst: int, group: Group = None) -> None:
    """Send a slot's contents to another rank, which calls `receive_slot`."""
    head = to_json([header.generation, header.step, header.world, header.rank, header.sharded, data.numel()])
    for part in (_tensor_of(head), _tensor_of(meta)):
        dist.send(torch.tensor([part.numel()], device=_device(group)), dst, group)
        _send(part, dst, group)
    _send(data, dst, group)


def receive_slot(slots: SlotPair, src: int, group: Group = None) -> None:
    """Receive a slot's contents from rank `src` into the older slot here."""
    head, meta = (_receive_bytes(src, group) for _ in range(2))
    generation, step, world, rank, sharded, nbytes = map(int, from_json(head))
    _, memory = slots.begin_write(nbytes, len(meta), hurry=True)
    if nbytes:
        _receive(slot_bytes(memory, nbytes), src, group)
    slots.commit_write(SlotHeader(generation, step, world, rank, sharded=bool(sharded)), nbytes, meta)


def slot_bytes(memory: mmap.mmap, nbytes: int) -> torch.Tensor:
    """Return the data of a slot as a uint8 tensor of shape (nbytes,), sharing its memory."""
    return torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER_NBYTES, count=nbytes)


def _receive_bytes(src: int, group: Group) -> bytes:
    length = torch.zeros(1, dtype=torch.int64, device=_device(group))
    dist.recv(length, src, group)
    data = torch.empty(int(length), dtype=torch.uint8)
    _receive(data, src, group)
    return data.numpy().tobytes()


def _send(data: torch.Tensor, dst: int, group: Group) -> None:
    for begin in range(0, data.numel(), _CHUNK_NBYTES):
        dist.send(data[begin : begin + _CHUNK_NBYTES].to(_device(group)), dst, group)


def _receive(data: torch.Tensor, src: int, group: Group) -> None:
    device = _device(group)
    for begin in range(0, data.numel(), _CHUNK_NBYTES):
        piece = data[begin : begin + _CHUNK_NBYTES]
        moved = piece if piece.device == device else torch.empty_like(piece, device=device)
        dist.recv(moved, src, group)
        if moved is not piece:
            piece.copy_(moved)


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _device(group: Group) -> torch.device:
    """Return the device on which tensors must be for this group to send them."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
