"""Copying tensors from a GPU into ordinary memory through two pinned buffers, on a stream of its own.

A GPU writes into pinned memory at the speed of its bus, and while it fills one buffer the CPU empties the other. The
copies wait for what the caller's stream has queued, an optimizer's step for instance, and the caller for the copies:
whatever changes the tensors afterwards comes too late to be seen. https://docs.pytorch.org/docs/stable/notes/cuda.html
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

__all__ = ["PinnedStaging", "finish_queued_work"]

_log = logging.getLogger(__name__)

_BUFFER_NBYTES: Final = 32 << 20
"""Of each buffer: some milliseconds of a GPU's bus, beside which a copy's start of some microseconds is nothing."""

CopyPiece = tuple[Any, Any]
"""Bytes to copy to, and bytes to copy from, as numpy arrays of uint8."""


def finish_queued_work() -> None:
    """Wait until the GPU has done what is queued, so that its time counts as training, and not as that of a save."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()


@dataclass(frozen=True)
class _Filled:
    """A buffer that is full when `event` has happened, and where its parts belong."""

    event: torch.cuda.Event
    pieces: Sequence[CopyPiece]


class PinnedStaging:
    """Copies tensors from GPUs. One caller at a time.

    Args:
        nbytes: of each of the two buffers, which are there from the first copy on.
    """

    def __init__(self, nbytes: int = _BUFFER_NBYTES) -> None:
        self._nbytes = nbytes
        self._buffers: list[torch.Tensor] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy_tensors(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        write: Callable[[Sequence[CopyPiece]], object],
    ) -> None:
        """Copy each source to its target, and return when that is done.

        Args:
            targets: contiguous, on the CPU.
            sources: on GPUs, with the targets' shapes and types.
            write: copies pieces from a buffer to the targets, and returns when it is done.
        """
        pairs = list(zip(targets, sources, strict=True))
        for device in dict.fromkeys(source.device for source in sources):
            self._copy_from(device, [pair for pair in pairs if pair[1].device == device], write)

    def _copy_from(
        self,
        device: torch.device,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        write: Callable[[Sequence[CopyPiece]], object],
    ) -> None:
        buffers = self._buffers = self._buffers or [_pinned(self._nbytes) for _ in range(2)]
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        filled: _Filled | None = None
        with torch.cuda.stream(stream):
            for number, batch in enumerate(_batches(pairs, self._nbytes, stream)):
                filling = _fill(buffers[number % 2], batch, stream)
                if filled is not None:
                    _empty(filled, write)
                filled = filling
        if filled is not None:
            _empty(filled, write)


def _batches(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], nbytes: int, stream: torch.cuda.Stream
) -> Iterator[list[tuple[Any, torch.Tensor]]]:
    """Parts of the targets and of the sources, as many together as a buffer holds."""
    batch: list[tuple[Any, torch.Tensor]] = []
    room = nbytes
    for target, source in pairs:
        if not source.numel():
            continue
        # An interrupt may end the wait for the copies: until they are done, their memory must not be used for others.
        source.record_stream(stream)
        whole = source.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        place = target.reshape(-1).view(torch.uint8).numpy()
        begin = 0
        while begin < len(place):
            end = min(len(place), begin + room)
            batch.append((place[begin:end], whole[begin:end]))
            room -= end - begin
            begin = end
            if not room:
                yield batch
                batch, room = [], nbytes
    if batch:
        yield batch


def _fill(buffer: torch.Tensor, batch: Sequence[tuple[Any, torch.Tensor]], stream: torch.cuda.Stream) -> _Filled:
    """Have the GPU fill a buffer, from which nothing is to be read any more."""
    memory = buffer.numpy()
    pieces = []
    begin = 0
    for place, part in batch:
        end = begin + len(place)
        buffer[begin:end].copy_(part, non_blocking=True)
        pieces.append((place, memory[begin:end]))
        begin = end
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return _Filled(event, pieces)


def _empty(filled: _Filled, write: Callable[[Sequence[CopyPiece]], object]) -> None:
    filled.event.synchronize()
    write(filled.pieces)


def _pinned(nbytes: int) -> torch.Tensor:
    """A buffer that the GPU writes to directly, or an ordinary one where the system refuses that."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as exc:
        _log.warning("no pinned memory for copies from the GPU (%s): they will be slower", exc)
        return torch.empty(nbytes, dtype=torch.uint8)
