"""Finds a user's data set by name, and yields its rows, or sequences of rows, batch by batch: files and `Dataset`s.

Rows that need no label are not loaded where their ids are known without it. What does not belong here: asking teachers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edl.distill.datasets.factories import open_samples
from edl.distill.datasets.files import open_arrays
from edl.distill.datasets.kinds import LabelDataset
from edl.distill.datasets.ragged import open_jsonl, open_parquet
from edl.errors import SettingsError

__all__ = ["LabelDataset", "open_data"]


def open_data(
    name: str,
    inputs: Sequence[str],
    ids: str | None = None,
    workers: int = 0,
    *,
    sequences: bool = False,
    offsets: str | None = None,
) -> LabelDataset:
    """Open the data set called `name`.

    Args:
        name: `FILE.npz` or `FILE.npy` (mapped into memory where possible), or `MODULE:FACTORY` or `FILE.py:FACTORY`: a
            function that returns a `Dataset`, a sequence or an iterable of samples (arrays, tuples or mappings).
            `FILE.jsonl` and `FILE.parquet` (list columns) have sequences.
        inputs: of the teachers' model: `NAME`, or `NAME=KEY` where the data set calls it otherwise (an array of the
            file, the key of a mapping, the position in a tuple).
        ids: what holds the ids: an array of an `.npz` file, an `.npy` file, or the key or position in a sample. None: a
            row's position is its id.
        workers: see `SequenceData`.
        sequences: whether each sample of a function is a sequence of tokens, of its own length.
        offsets: of sequences in an `.npz` file, the array [sequences + 1] of where each begins.

    Raises:
        SettingsError: there is no such data set, or it has no such parts.
    """
    wanted = dict(_split(part) for part in inputs)
    if not wanted or "" in wanted:
        raise SettingsError(f"--inputs {','.join(inputs)!r}: name at least one input of the teachers")
    if workers < 0:
        raise SettingsError(f"--workers {workers}: must be 0 or more")
    if offsets is not None and not name.endswith((".npz", ".npy")):
        raise SettingsError(f"--offsets {offsets}: belongs to sequences in an .npz file")
    if name.endswith((".npz", ".npy")):
        if sequences and offsets is None:
            raise SettingsError(
                "--sequences: name the array of where each begins with --offsets, as an .npz file has it"
            )
        return open_arrays(Path(name), wanted, ids, offsets)
    if name.endswith(".jsonl"):
        return open_jsonl(Path(name), wanted, ids)
    if name.endswith(".parquet"):
        return open_parquet(Path(name), wanted, ids)
    return open_samples(name, wanted, ids, workers, sequences=sequences)


def _split(part: str) -> tuple[str, str]:
    name, _, key = part.partition("=")
    return name.strip(), key.strip() or name.strip()
