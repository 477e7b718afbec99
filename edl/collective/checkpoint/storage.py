"""Storing checkpoints: from the slots of one node's workers to a folder that outlives the node.

`Persister` is used by the agent, or by a thread of the worker where there is no agent. It needs no process group and
never makes a worker wait. Every node writes the files of its own ranks; whoever finds all ranks' pieces there completes
the checkpoint. A world that was given up must not do that, so `fence` is asked last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edl.collective.checkpoint.slots import Copy, Found, find
from edl.collective.checkpoint.storage_files import Folder
from edl.collective.checkpoint.storage_manifest import MANIFEST, METADATA, Manifest, Name, Piece, Summed
from edl.errors import ProtocolError, TemporaryError

if TYPE_CHECKING:
    from edl.collective.checkpoint.storage_files import SummingWriter

__all__ = ["Outcome", "Persister"]

_log = logging.getLogger(__name__)

State = tuple[int, int, int]


@dataclass(frozen=True)
class Outcome:
    """What was stored.

    Attributes:
        step, generation, world: which state.
        committed: whether the checkpoint is complete now; if not, other nodes have not written their parts yet.
    """

    step: int
    generation: int
    world: int
    committed: bool


class Persister:
    """Writes one node's part of checkpoints to a URL. One thread at a time."""

    def __init__(self, url: str, *, keep: int = 3, fence: Callable[[], bool] | None = None) -> None:
        """A writer to `url`, a folder or any URL of fsspec.

        Args:
            keep: how many complete checkpoints to keep there.
            fence: says whether this node's world is still the current one; asked before a checkpoint is completed.

        Raises:
            SettingsError: nothing here can reach such a URL.
        """
        self._folder = Folder(url)
        self._keep = max(1, keep)
        self._fence = fence or (lambda: True)
        self._done: State | None = None

    def persist(
        self, slots: Sequence[Path], *, step: int | None = None, generation: int | None = None, marked: bool = False
    ) -> Outcome | None:
        """Store the newest state that all of `slots` hold and that was not stored yet.

        Args:
            slots: `EDL_SLOTS` of each worker of this node.
            step: only this one.
            generation: only this one.
            marked: only one that the workers marked for storage, which they do at the same steps on all nodes.

        Returns:
            What was stored; None if there was nothing to store, or it was overwritten too soon, or the fence says no.

        Raises:
            TemporaryError: the storage failed. What was stored before is as it was.
        """
        chosen = self._choose(slots, step, generation, marked)
        if chosen is None:
            return None
        state, found = chosen
        try:
            return self._store(state, found)
        except OSError as exc:
            raise TemporaryError(f"storage {self._folder.url} did not take step {state[1]}: {exc}") from exc

    def _choose(
        self, slots: Sequence[Path], step: int | None, generation: int | None, marked: bool
    ) -> tuple[State, list[Found]] | None:
        """The newest state in all slots, and where it is."""
        held: list[dict[State, Found]] = []
        for prefix in slots:
            labels = {(one.label.generation, one.label.step, one.label.world): one for one in reversed(find(prefix))}
            held.append(labels)
        common = set.intersection(*map(set, held)) if held else set()
        wanted = [
            state
            for state in common
            if (step is None or state[1] == step)
            and (generation is None or state[0] == generation)
            and (not marked or all(labels[state].label.persist for labels in held))
            and (self._done is None or state > self._done)
        ]
        return (max(wanted), [labels[max(wanted)] for labels in held]) if wanted else None

    def _store(self, state: State, found: list[Found]) -> Outcome | None:
        generation, step, world = state
        name = self._folder.working(step, generation)
        self._folder.begin(name)
        for one in found:
            copy = one.copy()
            if copy is None:
                _log.info("the state after step %d was overwritten before it was stored: the next one will be", step)
                return None
            self._write(name, copy)
        committed = self._complete(name, world)
        self._done = state
        if committed is None:
            return None
        if committed:
            self._prune(name)
        return Outcome(step, generation, world, committed)

    def _write(self, name: Name, copy: Copy) -> None:
        from edl.collective.checkpoint.storage_dcp import Items, write_rank  # torch, which only this needs

        rank, items = copy.label.rank, Items()
        file = f"__{rank}_0.distcp"

        def write(stream: SummingWriter) -> None:
            write_rank(copy, stream, items)

        summed = self._folder.write(name, file, write)
        piece = items.piece(copy, file, summed).pack()
        self._folder.write(name, Piece.name(rank), lambda stream: stream.write(piece))

    def _complete(self, name: Name, world: int) -> bool | None:
        """Complete the checkpoint if every rank's piece is there. None if the fence says no."""
        there = self._folder.files(name)
        if not all(Piece.name(rank) in there for rank in range(world)):
            return MANIFEST in self._folder.files(Name(name.step, name.generation))
        try:
            try:
                manifest = self._manifest(name, world)
            except ProtocolError as exc:
                _log.info("not complete yet: %s", exc)  # another node is just writing its piece
                return False
            if not self._fence():
                _log.warning("the world of generation %d was given up: %s is not completed", name.generation, name)
                self._folder.remove(name)
                return None
            self._folder.write(name, MANIFEST, lambda stream: stream.write(manifest.pack()))
            self._folder.publish(name)
        except FileNotFoundError:
            if MANIFEST not in self._folder.files(Name(name.step, name.generation)):
                raise
        return True  # or another node was faster

    def _manifest(self, name: Name, world: int) -> Manifest:
        from edl.collective.checkpoint.storage_dcp import metadata

        files: dict[str, Summed] = {}
        pieces = []
        for rank in range(world):
            data = self._folder.read(name, Piece.name(rank))
            piece = Piece.parse(data)
            if piece.world != world:
                raise ProtocolError(
                    f"{name} has a piece of a world of {piece.world} ranks, not {world}: of another run"
                )
            pieces.append(piece)
            files[Piece.name(rank)] = Summed.of(data)
            files[piece.file] = piece.summed
        packed = metadata(pieces)
        files[METADATA] = self._folder.write(name, METADATA, lambda stream: stream.write(packed))
        return Manifest(name.step, name.generation, world, files)

    def _prune(self, newest: Name) -> None:
        """Remove complete checkpoints beyond those to keep, and incomplete ones that a newer one has overtaken."""
        complete = []
        for name in self._folder.names():
            if not name.temporary and self._is_complete(name):
                if name <= Name(newest.step, newest.generation):  # a newer one is not what was just stored: leave it
                    complete.append(name)
            elif name < Name(newest.step, newest.generation):
                self._folder.remove(name)
        for name in complete[self._keep :]:
            self._folder.remove(name)

    def _is_complete(self, name: Name) -> bool:
        try:
            return self._folder.manifest(name) is not None
        except ProtocolError:
            return False
