"""Restores from storage: loads the newest undamaged checkpoint, into a world of any size.

Every byte that is needed is read once, several megabytes at a time. One of the ranks reads what all ranks need, and
broadcasts it. The data stays in memory until all ranks have verified the checksums of what they read, so a damaged
checkpoint leaves the state unchanged. This takes no more memory than the slots that the first save needs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from edl.collective import ranks
from edl.collective.checkpoint.encoding import StateMetadata, TensorEntry, box_overlap, from_json, read_meta, to_json
from edl.collective.checkpoint.memory.restore import RestoredState
from edl.collective.checkpoint.state.state import State, StateRestore
from edl.collective.checkpoint.storage.folder import (
    CheckpointFolder,
    CheckpointName,
    FileDigest,
    Manifest,
    RankManifest,
)
from edl.errors import ProtocolError, TemporaryError

logger = logging.getLogger(__name__)

_SPAN_NBYTES: Final = 32 << 20  # of items that are read together: keeps a storage busy, and is quick to broadcast
_BLOCK_NBYTES: Final = 16 << 20  # per read: smaller ones cost more requests, larger ones leave less to do in parallel
_GAP_NBYTES: Final = 64 << 10  # between items, read too instead of splitting the read: metadata and plain values
_READS: Final = 8  # at a time: fewer leave the network idle, more make an object store refuse some


@dataclass(frozen=True)
class _Item:
    piece: RankManifest
    entry: TensorEntry

    @property
    def begin(self) -> int:
        return self.piece.tensors[self.entry.key][0]

    @property
    def end(self) -> int:
        return sum(self.piece.tensors[self.entry.key])


@dataclass
class _Span:
    """Items that are close to one another in a file and are therefore read together."""

    file: str
    begin: int
    end: int
    items: list[_Item]
    data: bytearray = field(default_factory=bytearray)

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def tensor(self, item: _Item, *, check: bool = False) -> torch.Tensor:
        """Return an item's tensor, sharing the memory of the data that was read."""
        from edl.collective.checkpoint.storage.dcp import read_tensor  # here, as it loads torch's checkpoint code

        view = memoryview(self.data)[item.begin - self.begin : item.end - self.begin]
        return read_tensor(view, item.entry, check=check)


def restore_from_storage(state: State, url: str, group: ranks.Group = None) -> RestoredState | None:
    """Restore the newest checkpoint under `url` whose needed parts are undamaged; None if there is none. Collective.

    Raises:
        TemporaryError: The storage cannot be read.
    """
    folder = CheckpointFolder(url)
    try:
        for name in _share_names(folder, group):
            pieces = _share_rank_manifests(folder, name, group)
            if pieces and _load_checkpoint(state, folder, name, pieces, group):
                return RestoredState(name.step, pieces[0].world)
    except OSError as exc:
        raise TemporaryError(f"storage {url} cannot be read: {exc}") from exc
    return None


def newest_stored(url: str, group: ranks.Group = None, *, run: str = "") -> tuple[int, int]:
    """Return generation and step of the newest checkpoint (of `run`), even if damaged, or (-1, -1). Collective."""
    try:
        names = (name for name in _share_names(CheckpointFolder(url), group) if name.run == run or not run)
        return next(((name.generation, name.step) for name in names), (-1, -1))
    except OSError as exc:
        raise TemporaryError(f"storage {url} cannot be read: {exc}") from exc


def _share_names(folder: CheckpointFolder, group: ranks.Group) -> Iterator[CheckpointName]:
    """Yield the names of the complete checkpoints that the first rank sees, so that all ranks try the same ones."""
    mine = folder.list_checkpoints() if ranks.rank_of(group) == 0 else []
    names = [str(name) for name in mine if folder.is_published(name)]
    src = ranks.global_rank(0, group)
    for text in ranks.broadcast_bytes("\n".join(names).encode(), src, group).decode().splitlines():
        name = CheckpointName.parse(text)
        if name is not None:
            yield name


def _share_rank_manifests(folder: CheckpointFolder, name: CheckpointName, group: ranks.Group) -> list[RankManifest]:
    """Return the ranks' manifests of a checkpoint, as read by the first rank; [] if it is incomplete or damaged."""
    answer = to_json(_read_rank_manifests(folder, name)) if ranks.rank_of(group) == 0 else b""
    found = from_json(ranks.broadcast_bytes(answer, ranks.global_rank(0, group), group))
    if "failed" in found:
        raise OSError(found["failed"])
    if "wrong" in found:
        _warn_damaged(folder, name, found["wrong"])
    return [RankManifest.parse(text.encode()) for text in found.get("pieces", [])]


def _read_rank_manifests(folder: CheckpointFolder, name: CheckpointName) -> dict[str, Any]:
    """Return the manifests of a checkpoint's ranks, or a description of the damage or of the reading error."""
    try:
        manifest = folder.read_manifest(name)
        if manifest is None:
            return {}
        with ThreadPoolExecutor(_READS) as pool:
            files = [RankManifest.file_name(rank) for rank in range(manifest.world)]
            texts = list(pool.map(lambda file: folder.read_file(name, file), files))
        for rank, (file, text) in enumerate(zip(files, texts, strict=True)):
            if manifest.files.get(file) != FileDigest.of_bytes(text) or not _is_consistent(
                RankManifest.parse(text), rank, manifest
            ):
                return {"wrong": file}
    except (FileNotFoundError, ProtocolError) as exc:
        return {"wrong": str(exc)}
    except OSError as exc:
        return {"failed": str(exc) or type(exc).__name__}
    return {"pieces": [text.decode() for text in texts]}


def _is_consistent(piece: RankManifest, rank: int, manifest: Manifest) -> bool:
    """Return whether a manifest belongs to `rank` in this checkpoint, and its items lie within the rank's file."""
    ends = [begin + length for begin, length in piece.tensors.values()]
    return (piece.rank, piece.world, manifest.files.get(piece.file)) == (rank, manifest.world, piece.summed) and all(
        end <= piece.summed.size for end in ends
    )


def _warn_damaged(folder: CheckpointFolder, name: CheckpointName, wrong: str) -> None:
    logger.warning("checkpoint %s in %s is damaged (%s): using the previous one", name, folder.url, wrong)


def _load_checkpoint(
    state: State, folder: CheckpointFolder, name: CheckpointName, pieces: Sequence[RankManifest], group: ranks.Group
) -> bool:
    """Read what this rank needs. If all ranks' data is undamaged, load the data into the state and return True."""
    rank, world = ranks.rank_of(group), ranks.world_of(group)
    same = len(pieces) == world
    metas = [read_meta(piece.meta) for piece in pieces]
    loading = state.begin_load(metas[rank if same else 0], local=same)
    items = list(_stored_items(pieces, metas))
    # The scope was recorded when the state was saved, so all ranks divide the same tensors among them.
    common = [item for item in items if item.entry.scope == "replicated" and world > 1]
    own = [
        item
        for item in items
        if not (item.entry.scope == "replicated" and world > 1)
        and (item.entry.scope != "local" or (same and item.piece.rank == rank))
        and _is_needed(loading, item.entry)
    ]
    shared = _assign_readers(_group_items(common), world)
    mine = _group_items(own)
    wrong, failed = "", None
    try:
        wrong = _read_spans(folder, name, [*mine, *(span for span, reader in shared if reader == rank)])
    except OSError as exc:
        failed = exc
    verdict = 2 if failed is not None else int(bool(wrong))
    if world > 1:  # so that no rank waits for one that gave up
        (verdict,) = ranks.all_reduce_max([verdict], group)
    if wrong:
        _warn_damaged(folder, name, wrong)
    if verdict == 2:
        raise failed or OSError("another rank could not read its part")
    if verdict:
        return False
    for span in mine:
        _fill_from_span(loading, span)
    for span, reader in shared:
        span.data = span.data or bytearray(span.nbytes)
        whole = torch.frombuffer(span.data, dtype=torch.uint8)
        ranks.broadcast_tensor(whole, ranks.global_rank(reader, group), group)
        _fill_from_span(loading, span)
    loading.finish()
    return True


def _stored_items(pieces: Sequence[RankManifest], metas: Sequence[StateMetadata]) -> Iterator[_Item]:
    """Yield every non-empty stored tensor or part. If several ranks stored the same part, yield only the first."""
    seen = set()
    for piece, meta in zip(pieces, metas, strict=True):
        for entry in meta.entries:
            place = (entry.key, entry.starts, piece.rank if entry.scope == "local" else -1)
            if entry.key in piece.tensors and entry.nbytes and place not in seen:
                seen.add(place)
                yield _Item(piece, entry)


def _group_items(items: Iterable[_Item]) -> list[_Span]:
    spans: list[_Span] = []
    for item in sorted(items, key=lambda item: (item.piece.rank, item.begin)):
        last = spans[-1] if spans else None
        if (
            last is not None
            and last.file == item.piece.file
            and item.begin - last.end <= _GAP_NBYTES
            and item.end - last.begin <= _SPAN_NBYTES
        ):
            last.items.append(item)
            last.end = max(last.end, item.end)
        else:
            spans.append(_Span(item.piece.file, item.begin, item.end, [item]))
    return spans


def _assign_readers(spans: Iterable[_Span], world: int) -> list[tuple[_Span, int]]:
    """Return each span with its reader: the rank that has the least to read so far."""
    loads = [0] * world
    shared = []
    for span in spans:
        reader = loads.index(min(loads))
        loads[reader] += span.nbytes
        shared.append((span, reader))
    return shared


def _read_spans(folder: CheckpointFolder, name: CheckpointName, spans: Sequence[_Span]) -> str:
    """Read spans. Returns a description of the damage, or "" if there is none."""
    blocks = [
        (span, begin, min(begin + _BLOCK_NBYTES, span.end))
        for span in spans
        for begin in range(span.begin, span.end, _BLOCK_NBYTES)
    ]

    def read(block: tuple[_Span, int, int]) -> None:
        span, begin, end = block
        data = folder.read_file_range(name, span.file, begin, end - begin)
        if len(data) != end - begin:
            raise ProtocolError(f"{span.file} ends before {end}")
        span.data[begin - span.begin : end - span.begin] = data

    def check(span: _Span) -> None:
        for item in span.items:
            span.tensor(item, check=True)

    for span in spans:
        span.data = bytearray(span.nbytes)
    with ThreadPoolExecutor(_READS, thread_name_prefix="edl-read") as pool:
        try:
            list(pool.map(read, blocks))
            list(pool.map(check, spans))
        except (FileNotFoundError, ProtocolError) as exc:
            return str(exc)
        finally:
            pool.shutdown(cancel_futures=True)
    return ""


def _fill_from_span(loading: StateRestore, span: _Span) -> None:
    for item in span.items:
        loading.fill_tensor(item.entry, span.tensor(item))
    span.data = bytearray()


def _is_needed(loading: StateRestore, entry: TensorEntry) -> bool:
    """Return whether this rank needs any region of a stored part."""
    target = loading.targets.get(entry.key)
    if target is None or not entry.nbytes:
        return False
    return box_overlap(target.starts, target.local.shape, entry.starts, entry.shape) is not None
