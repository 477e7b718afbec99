"""What a stored checkpoint says of itself, in JSON: a file for each rank, and a manifest over all files. Pure.

::

    step-1000.g-3.r-346d06b6a1b2c3d4/
        __0_0.distcp      a rank's tensors, and with rank 0 what all ranks share
        piece-0.json      what is where in it, and the rank's metadata
        .metadata         the same for torch.distributed.checkpoint
        manifest.json     sizes and checksums of all of these; where it is, the checkpoint is complete

The name carries the step, the generation of the world that saved it, and the run that generation belongs to: files of
two runs, which may count generations alike, never meet in one folder. While a checkpoint is written to a folder, the
folder's name ends in `.tmp`; a store that has no renaming is written in place, and the manifest comes last. What was
written before runs had names has none in its own, and loads as well.

A step and a generation do not tell two runs apart: each run counts its generations from its beginning, and without an
agent there is one only. So every run has a number made of the time at which it began and of random bits, which sorts
runs. Under `edl run` the job's agents agree on it in their Store. Elsewhere the ranks do, when they agree on the next
save: each proposes a number, and the largest counts. The environment could not tell: torchrun gives the workers of a
world that changed the same run id, restart count, address and port as those before them.
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

_RANDOM_BITS = 31  # with 32 bits of seconds 63: an int64, as ranks agree on


def new_run_id() -> int:
    """Return a number that no other run has, above the numbers of runs that began a second ago or earlier; 63 bits."""
    return int(time.time()) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS) or 1


def run_name(run: int) -> str:
    """Return the number as it stands in names: 16 hexadecimal digits, which sort as the numbers do."""
    return f"{run:016x}"


MANIFEST: Final = "manifest.json"
METADATA: Final = ".metadata"
_FORMAT: Final = 1  # another number refuses checkpoints that this version could not read
_NAME: Final = re.compile(r"step-(\d+)\.g-(-?\d+)(?:\.r-([0-9a-f]{16}))?(\.tmp)?")


@dataclass(frozen=True, order=True)
class CheckpointName:
    """A checkpoint's name. Names sort from old to new: by the step, then by when the run began.

    Attributes:
        step: the last one finished.
        run: 16 hexadecimal digits (`edl.collective.checkpoint.storage.manifest`); empty for what older versions wrote.
        generation: of the world, counted within the run.
        temporary: whether it is a folder to be renamed when it is complete.
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
        """Return the name of a folder, or None for a folder that is something else."""
        match = _NAME.fullmatch(text)
        return None if match is None else cls(int(match[1]), match[3] or "", int(match[2]), match[4] is not None)

    @property
    def final(self) -> CheckpointName:
        """The name of the checkpoint when it is complete."""
        return replace(self, temporary=False)


def newest_first(names: Iterable[CheckpointName]) -> list[CheckpointName]:
    """Sort checkpoints, and put behind all others the checkpoints that their own run has given up.

    A later generation of a run that has stored the same step or an earlier one went on from before that: what the
    earlier generation did from there on is not part of the training any longer, though it had got further.
    """
    ordered = sorted(names, reverse=True)
    reached: dict[str, list[CheckpointName]] = {}
    for name in ordered:
        reached.setdefault(name.run, []).append(name)
    abandoned = {
        name
        for run, of_run in reached.items()
        if run  # without one, generations of several runs cannot be compared
        for name in of_run
        if any(later.generation > name.generation and later.step <= name.step for later in of_run)
    }
    return [name for name in ordered if name not in abandoned] + [name for name in ordered if name in abandoned]


@dataclass(frozen=True)
class FileDigest:
    """The digest of a file.

    Attributes:
        size: in bytes.
        crc32: of its contents.
    """

    size: int
    crc32: int

    @classmethod
    def of_bytes(cls, data: bytes) -> FileDigest:
        """Return the digest of a file with these contents."""
        return cls(len(data), zlib.crc32(data))


@dataclass(frozen=True)
class RankManifest:
    """What a rank stored.

    Attributes:
        rank, world: the rank, of how many.
        file: name of its data.
        summed: the digest of that file.
        tensors: where in the file the tensors lie, by key: offset and length in bytes.
        values: the same for plain values (rank 0).
        paths: where tensors and values are in the nested state, by key (rank 0).
        meta: the metadata of the rank's state, as JSON has it.
        run: the name of the run that it is of.
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
        """Return the name of the file that a rank's manifest stands in."""
        return f"piece-{rank}.json"

    def pack(self) -> bytes:
        """As JSON."""
        return to_json({"format": _FORMAT, **asdict(self)})

    @classmethod
    def parse(cls, data: bytes) -> RankManifest:
        """Read one.

        Raises:
            ProtocolError: it is none.
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
    """The manifest of a complete checkpoint.

    Attributes:
        step, generation, world, run: which state it is.
        files: the digests of its files, by name.
    """

    step: int
    generation: int
    world: int
    files: dict[str, FileDigest]
    run: str = ""

    def pack(self) -> bytes:
        """As JSON."""
        return to_json({"format": _FORMAT, **asdict(self)})

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Read one.

        Raises:
            ProtocolError: it is none.
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
