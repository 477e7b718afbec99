"""Restoring from storage: the newest checkpoint that is whole, into a world of any size."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from edl.collective.checkpoint import transfer
from edl.collective.checkpoint.memory import Restored
from edl.collective.checkpoint.snapshot import Entry, overlap, read_meta
from edl.collective.checkpoint.state import Loading, State
from edl.collective.checkpoint.storage_files import Folder
from edl.collective.checkpoint.storage_manifest import Manifest, Name, Piece
from edl.collective.ranks import rank_of, world_of
from edl.errors import ProtocolError, TemporaryError

__all__ = ["newest", "restore"]

_log = logging.getLogger(__name__)


def restore(state: State, url: str, group: transfer.Group = None) -> Restored | None:
    """Restore the newest checkpoint under `url` of which every file is whole. Collective.

    Each rank checks some of the files, and reads of the tensors what it needs.

    Returns:
        What was restored, or None if there is no whole checkpoint.

    Raises:
        TemporaryError: the storage cannot be read.
    """
    folder = Folder(url)
    try:
        for name in _shared(folder, group):
            manifest = _whole(folder, name, group)
            if manifest is not None:
                _load(state, folder, name, manifest, group)
                return Restored(manifest.step, manifest.world)
    except OSError as exc:
        raise TemporaryError(f"storage {url} cannot be read: {exc}") from exc
    return None


def newest(url: str, group: transfer.Group = None, *, run: str = "") -> tuple[int, int]:
    """Generation and step of the newest checkpoint under `url`, which may yet turn out to be damaged. Collective.

    Args:
        run: of this run only, if given.

    Returns:
        (-1, -1) if there is none.

    Raises:
        TemporaryError: the storage cannot be read.
    """
    try:
        names = (name for name in _shared(Folder(url), group) if name.run == run or not run)
        return next(((name.generation, name.step) for name in names), (-1, -1))
    except OSError as exc:
        raise TemporaryError(f"storage {url} cannot be read: {exc}") from exc


def _shared(folder: Folder, group: transfer.Group) -> Iterator[Name]:
    """The names of the complete ones that the first rank sees, so that all ranks look at the same."""
    mine = folder.names() if rank_of(group) == 0 else []
    names = [str(name) for name in mine if not name.temporary and folder.is_published(name)]
    src = transfer.global_rank(0, group)
    for text in transfer.broadcast_bytes("\n".join(names).encode(), src, group).decode().splitlines():
        name = Name.parse(text)
        if name is not None:
            yield name


def _whole(folder: Folder, name: Name, group: transfer.Group) -> Manifest | None:
    """The manifest of a checkpoint if all of its files are as they were written."""
    rank, world = rank_of(group), world_of(group)
    manifest, wrong = None, ""
    try:
        manifest = folder.manifest(name)
        if manifest is not None:
            mine = sorted(manifest.files.items())[rank::world]
            wrong = next((file for file, summed in mine if not folder.intact(name, file, summed)), "")
    except ProtocolError as exc:
        wrong = str(exc)
    verdict = 2 if wrong else 1 if manifest is None else 0
    if world > 1:
        (verdict,) = transfer.agree_on_most([verdict], group)
    if wrong:
        _log.warning("checkpoint %s in %s is damaged (%s): using the one before it", name, folder.url, wrong)
    return None if verdict else manifest


def _load(state: State, folder: Folder, name: Name, manifest: Manifest, group: transfer.Group) -> None:
    pieces = [Piece.parse(folder.read(name, Piece.name(rank))) for rank in range(manifest.world)]
    rank = rank_of(group)
    same = manifest.world == world_of(group)
    own = read_meta(pieces[rank if same else 0].meta)
    loading = state.begin_load(own, local=same)
    seen = set()
    for piece in pieces:
        for entry in read_meta(piece.meta).entries:
            wanted = entry.scope != "local" or (same and piece.rank == rank)
            place = (entry.key, entry.starts)
            if entry.key in piece.tensors and wanted and place not in seen and _touches(loading, entry):
                seen.add(place)
                _fill(loading, folder, name, piece, entry)
    loading.finish()


def _touches(loading: Loading, entry: Entry) -> bool:
    """Whether this rank needs any of a stored part."""
    target = loading.targets.get(entry.key)
    if target is None or not entry.nbytes:
        return False
    return overlap(target.starts, target.local.shape, entry.starts, entry.shape) is not None


def _fill(loading: Loading, folder: Folder, name: Name, piece: Piece, entry: Entry) -> None:
    from edl.collective.checkpoint.storage_dcp import tensor_of

    offset, length = piece.tensors[entry.key]
    loading.fill(entry, tensor_of(folder.read_range(name, piece.file, offset, length), entry))
