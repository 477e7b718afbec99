"""Manifests of a stored checkpoint, in JSON: one for each rank, and one for all files. Does no I/O.

::

    step-1000.g-3.r-346d06b6a1b2c3d4/
        __0_0.distcp      a rank's tensors; rank 0's file also has what all ranks share
        piece-0.json      where everything is in that file, and the rank's metadata
        .metadata         the same for torch.distributed.checkpoint
        manifest.json     sizes and checksums of all of these; its presence makes the checkpoint complete

The name contains the step, the generation of the world that saved it, and the run to which that generation belongs. So
files of two runs, which may use the same generation numbers, never share a folder. While a checkpoint is written to a
local folder, its name ends in `.tmp`. On other storage, which cannot rename, it is written in place and the manifest
comes last. Checkpoints from before runs had names have none in theirs, and still load.

Step and generation do not distinguish two runs: each run counts generations from its own beginning, and without an
agent there is only one. So every run has a number, made from the time at which it began and random bits, by which runs
sort. Under `edl run`, the job's agents agree on it in their Store. Otherwise, the ranks agree on it along with the
next save: each proposes a number, and the largest wins. The environment cannot supply it: after a change of the world,
torchrun gives workers the same run id, restart count, address and port as before.
"""

from __future__ import annotations

import re
import secrets
import time
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from edl.collective.checkpoint.encoding import from_json, to_json
from edl.errors import ProtocolError

__all__ = [
    "CheckpointName",
    "FileDigest",
    "MANIFEST",
    "METADATA",
    "Manifest",
    "RankManifest",
    "new_run_id",
    "newest_first",
    "run_name",
]

_RANDOM_BITS = 31  # with 32 bits of seconds that makes 63, which fit the int64 on which ranks agree


def new_run_id() -> int:
    """Return a unique 63-bit run number, larger than those of runs that began at least a second earlier."""
    return int(time.time()) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS) or 1


def run_name(run: int) -> str:
    """Return a run number as used in names: 16 hexadecimal digits, which sort like the numbers."""
    return f"{run:016x}"


MANIFEST: Final = "manifest.json"
METADATA: Final = ".metadata"
_FORMAT: Final = 1  # a checkpoint with another number is refused, because this version could not read it
_NAME: Final = re.compile(r"step-(\d+)\.g-(-?\d+)(?:\.r-([0-9a-f]{16}))?(\.tmp)?")


@dataclass(frozen=True, order=True)
class CheckpointName:
    """Name of a checkpoint. Names sort from old to new: by step, then by when the run began.

    Attributes:
        step: Last finished step.
        run: Name of the run, 16 hexadecimal digits; empty for checkpoints that older versions wrote.
        generation: Generation of the world, counted within the run.
        temporary: Whether this is a folder that is renamed when the checkpoint is complete.
    """

    step: int
    run: str
    generation: int
    temporary: bool = False

    def __str__(self) -> str:
        run = f".r-{self.run}" if self.run else ""
        return f"step-{self.step}.g-{self.generation}{run}{'.tmp' if self.temporary else ''}"

    @classmethod
    def parse(cls, text: str) -> CheckpointName | None:
        """Return the checkpoint name that a folder's name represents, or None if it is something else."""
        match = _NAME.fullmatch(text)
        return None if match is None else cls(int(match[1]), match[3] or "", int(match[2]), match[4] is not None)

    @property
    def final(self) -> CheckpointName:
        """The name of the checkpoint once it is complete."""
        return replace(self, temporary=False)


def newest_first(names: Iterable[CheckpointName]) -> list[CheckpointName]:
    """Sort checkpoints from new to old, with those that their own run has abandoned at the end.

    If a later generation of a run has stored the same or an earlier step, it resumed before that step. Whatever the
    earlier generation did from there on is no longer part of the training, even if it got further.
    """
    ordered = sorted(names, reverse=True)
    reached: dict[str, list[CheckpointName]] = {}
    for name in ordered:
        reached.setdefault(name.run, []).append(name)
    abandoned = {
        name
        for run, of_run in reached.items()
        if run  # without a run's name, generations of different runs cannot be compared
        for name in of_run
        if any(later.generation > name.generation and later.step <= name.step for later in of_run)
    }
    return [name for name in ordered if name not in abandoned] + [name for name in ordered if name in abandoned]


@dataclass(frozen=True)
class FileDigest:
    """Digest of a file.

    Attributes:
        size: Size in bytes.
        crc32: CRC32 of the contents.
    """

    size: int
    crc32: int

    @classmethod
    def of_bytes(cls, data: bytes) -> FileDigest:
        """Return the digest of a file with these contents."""
        return cls(len(data), zlib.crc32(data))


@dataclass(frozen=True)
class RankManifest:
    """Manifest of one rank's part of a checkpoint.

    Attributes:
        rank, world: The rank and the number of ranks.
        file: Name of the file with the rank's data.
        summed: Digest of that file.
        tensors: Offset and length in bytes of each tensor in the file, by key.
        values: Offset and length of each plain value (rank 0 only), by key.
        paths: Path in the nested state of each tensor and value (rank 0 only), by key.
        meta: Metadata of the rank's state, as parsed JSON.
        run: Name of the run.
    """

    rank: int
    world: int
    file: str
    summed: FileDigest
    tensors: dict[str, tuple[int, int]]
    values: dict[str, tuple[int, int]]
    paths: dict[str, tuple[Any, ...]]
    meta: Any
    run: str = ""

    @staticmethod
    def file_name(rank: int) -> str:
        """Return the name of the file that contains a rank's manifest."""
        return f"piece-{rank}.json"

    def pack(self) -> bytes:
        """Return the manifest as JSON."""
        return to_json({"format": _FORMAT, **asdict(self)})

    @classmethod
    def parse(cls, data: bytes) -> RankManifest:
        """Parse a rank's manifest.

        Raises:
            ProtocolError: The data is not a rank's manifest.
        """
        form = _form(data)
        try:
            return cls(
                rank=int(form["rank"]),
                world=int(form["world"]),
                file=str(form["file"]),
                summed=FileDigest(**form["summed"]),
                tensors={key: (int(offset), int(length)) for key, (offset, length) in form["tensors"].items()},
                values={key: (int(offset), int(length)) for key, (offset, length) in form["values"].items()},
                paths={key: tuple(path) for key, path in form["paths"].items()},
                meta=form["meta"],
                run=str(form.get("run", "")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise ProtocolError(f"a piece of a checkpoint cannot be read: {exc!r}") from exc


@dataclass(frozen=True)
class Manifest:
    """Manifest of a complete checkpoint.

    Attributes:
        step, generation, world, run: The state that the checkpoint contains.
        files: Digests of its files, by name.
    """

    step: int
    generation: int
    world: int
    files: dict[str, FileDigest]
    run: str = ""

    def pack(self) -> bytes:
        """Return the manifest as JSON."""
        return to_json({"format": _FORMAT, **asdict(self)})

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Parse a manifest.

        Raises:
            ProtocolError: The data is not a manifest.
        """
        form = _form(data)
        try:
            files = {str(name): FileDigest(**digest) for name, digest in form["files"].items()}
            step, generation, world = (int(form[key]) for key in ("step", "generation", "world"))
            return cls(step, generation, world, files, run=str(form.get("run", "")))
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise ProtocolError(f"a manifest cannot be read: {exc!r}") from exc


def _form(data: bytes) -> dict[str, Any]:
    form = from_json(data)
    if not isinstance(form, dict) or form.get("format") != _FORMAT:
        raise ProtocolError(f"of another format than {_FORMAT}: another version of EDL wrote it")
    return form
