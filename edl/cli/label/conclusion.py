"""Prints the outcome of a labelling: how many labels, where they are, and how to read them."""

from __future__ import annotations

from collections.abc import Sequence

from edl.datasets import LabelDataset
from edl.datasets.rows import RaggedData
from edl.distill.cache import CacheKey
from edl.distill.labelling import LabelReport

__all__ = ["model_of", "print_report", "print_use"]


def print_report(report: LabelReport, folder: str, nbytes: int, data: LabelDataset) -> None:
    """Print what this process has done.

    Args:
        report: of the labelling.
        folder: where the labels are.
        nbytes: of the folder.
        data: what was labelled.
    """
    progress, key = report.progress, report.key
    kind = "sequences" if data.sequences else "rows"
    print(
        f"{progress.labelled:,} {kind} labelled by {model_of(key)} in {progress.seconds:.1f} s "
        f"({progress.rows_per_s:,.0f} {kind}/s); {progress.known:,} had a label before"
    )
    if isinstance(data, RaggedData) and data.empty:
        print(f"{data.empty:,} of {data.rows:,} sequences have no token, and so no label")
    print(f"{folder}: {nbytes / 1e6:,.1f} MB")


def model_of(key: CacheKey) -> str:
    """Return the model and its version."""
    return f"{key.model} version {key.version}" if key.version else key.model


def print_use(key: CacheKey, folders: Sequence[str], *, sequences: bool = False) -> None:
    """Print how a program finds the labels.

    Args:
        key: of the labels.
        folders: where they are.
        sequences: whether they are of sequences.
    """
    read = "padded(ids, attention_mask)" if sequences else "rows(ids)"
    dataset = f", dataset={key.dataset!r}" if key.dataset else ""
    top_k = f", top_k={key.top_k}, temperature={key.temperature:g}" if key.top_k is not None else ""
    dtype = f", dtype={key.dtype!r}" if key.dtype else ""
    if len(folders) == 1:
        print("A reader finds them, by the same ids, with")
        print(f"  DistillReader(…, cache=SoftLabelCache(path={folders[0]!r}), id_field=…{dataset}{top_k}{dtype})")
        print("and a program without a reader with")
        print(f"  edl.distill.cache.load_labels({folders[0]!r}).{read}[{key.outputs[0]!r}]")
        return
    print("Copied into one (SoftLabelCache(path='TOGETHER').add_folder(FOLDER), for each), a reader finds them with")
    print(f"  DistillReader(…, cache=SoftLabelCache(path='TOGETHER'), id_field=…{dataset}{top_k}{dtype})")
    print("and a program without a reader, also where they are, with")
    print(f"  edl.distill.cache.load_labels([{', '.join(map(repr, folders))}]).{read}[{key.outputs[0]!r}]")
