"""Output of `edl label`: progress while it runs, the outcome at its end, and how a program reads the labels.

Progress is a bar in a terminal, and a line every few seconds in a file or pipe.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from edl.datasets import LabelDataset
from edl.datasets.rows import RaggedData
from edl.distill.cache import CacheKey
from edl.distill.labelling import LabelProgress

__all__ = ["Screen", "counted", "kind_of", "model_of", "open_screen", "print_outcome", "print_use"]

_LINE_EVERY_S = 5.0
"""Time between two lines of progress in a file or pipe."""


Screen: TypeAlias = Callable[[int, int | None, float, float | None, str], None]
"""Shows progress: rows done, rows in total, rows per second, seconds left, and who works on it."""


@contextlib.contextmanager
def open_screen(title: str) -> Iterator[Screen]:
    """Show progress on standard error."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    columns = (SpinnerColumn(), BarColumn(None), MofNCompleteColumn(), TextColumn("{task.fields[rate]:,.0f} rows/s"))
    with Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[who]}"), console=console) as bar:
        task = bar.add_task(title, total=None, rate=0.0, who="waiting for teachers")

        def show(done: int, total: int | None, rows_per_s: float, left_s: float | None, who: str) -> None:
            bar.update(task, completed=done, total=total, rate=rows_per_s, who=who)

        yield show


def _lines() -> Screen:
    next_at = time.monotonic()

    def show(done: int, total: int | None, rows_per_s: float, left_s: float | None, who: str) -> None:
        nonlocal next_at
        now = time.monotonic()
        if now < next_at:
            return
        next_at = now + _LINE_EVERY_S
        of_all = f" of {total:,}" if total is not None else ""
        parts = [f"{done:,}{of_all} rows", f"{rows_per_s:,.0f} rows/s", who]
        if left_s is not None:
            parts.append(f"{left_s / 60:.0f} min left" if left_s >= 120 else f"{left_s:.0f} s left")
        print(", ".join(parts), file=sys.stderr, flush=True)

    return show


def print_outcome(progress: LabelProgress, key: CacheKey, folder: str, nbytes: int, data: LabelDataset) -> None:
    """Print the outcome of a run in a single process."""
    kind = kind_of(data)
    print(
        f"{progress.labelled:,} {kind} labelled by {model_of(key)} in {progress.seconds:.1f} s "
        f"({progress.rows_per_s:,.0f} {kind}/s); {progress.known:,} had a label before"
    )
    if isinstance(data, RaggedData) and data.empty:
        print(f"{data.empty:,} of {data.rows:,} sequences have no token, and so no label")
    print(f"{folder}: {nbytes / 1e6:,.1f} MB")
    print_use(key, [folder], data)


def print_use(key: CacheKey, folders: Sequence[str], data: LabelDataset) -> None:
    """Print how a program reads the labels in these folders."""
    read = "padded(ids, attention_mask)" if data.sequences else "rows(ids)"
    dataset = f", dataset={key.dataset!r}" if key.dataset else ""
    top_k = f", top_k={key.top_k}, temperature={key.temperature:g}" if key.top_k is not None else ""
    dtype = f", dtype={key.dtype!r}" if key.dtype else ""
    path, where = repr(folders[0]), repr(folders[0])
    if len(folders) == 1:
        print("A reader finds them, by the same ids, with")
    else:
        path, where = "'TOGETHER'", f"[{', '.join(map(repr, folders))}]"
        print(
            "Copied into one (SoftLabelCache(path='TOGETHER').add_folder(FOLDER), for each), a reader finds them with"
        )
    print(f"  DistillReader(…, cache=SoftLabelCache(path={path}), id_field=…{dataset}{top_k}{dtype})")
    print("and a program without a reader with" + (", where they are now," if len(folders) > 1 else ""))
    print(f"  edl.distill.cache.load_labels({where}).{read}[{key.outputs[0]!r}]")


def counted(number: int, name: str) -> str:
    """Return a number with the name of what it counts."""
    return f"{number:,} {name}{'s' if number != 1 else ''}"


def kind_of(data: LabelDataset) -> str:
    """Return "sequences" or "rows"."""
    return "sequences" if data.sequences else "rows"


def model_of(key: CacheKey) -> str:
    """Return the model and its version."""
    return f"{key.model} version {key.version}" if key.version else key.model
