"""`edl label`: soft labels for a whole data set, ahead of time."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edl.cli.label import options as command_line
from edl.cli.label.output import counted, open_screen, print_outcome
from edl.datasets import open_data
from edl.distill.cache import SoftLabelCache
from edl.distill.labelling import DataGuard, Labeller, LabelPlan, LabelProgress, note_files

__all__ = ["main"]

_FLUSH_S = 5.0
"""Time between two writes to the disk. After a crash, labels of this time are asked for again."""


def main(argv: Sequence[str]) -> int:
    """Run `edl label`."""
    options = command_line.parser().parse_args(argv)
    command_line.check_job(options)
    plan = command_line.plan_of(options)
    files = note_files(options.data, options.ids)
    data = open_data(
        options.data,
        command_line.names(options.inputs),
        options.ids,
        options.workers,
        sequences=options.sequences,
        offsets=options.offsets,
    )
    new = not Path(options.output).exists()
    half: Any = "float16" if options.dtype == "float16" else None  # for servers that cannot send it
    try:
        with SoftLabelCache(0, options.output, store_dtype=half, flush_interval_s=_FLUSH_S) as cache:
            if options.job is None:
                return _label_all(options, DataGuard(data, files), plan, cache)
            from edl.cli.label.job import run_job  # imports the packages of a master

            return run_job(options, DataGuard(data, files, compare_rows=not options.no_data_check), plan, cache)
    except BaseException:
        if new:
            with contextlib.suppress(OSError):  # it has files, or was not made
                Path(options.output).rmdir()
        raise


def _label_all(options: argparse.Namespace, guard: DataGuard, plan: LabelPlan, cache: SoftLabelCache) -> int:
    with contextlib.closing(Labeller(guard, plan, cache)) as labeller:
        with open_screen(plan.teachers.name) as screen:

            def show(progress: LabelProgress) -> None:
                done = progress.known + progress.labelled
                left_s = None
                if progress.total is not None and progress.labelled:
                    left_s = (progress.total - done) / progress.rows_per_s
                teachers = counted(progress.teachers_live, "teacher")
                screen(done, progress.total, progress.rows_per_s, left_s, teachers)

            key = labeller.key(relabel=options.relabel)
            progress = labeller.label_all(show)
        print_outcome(progress, key, options.output, cache.stats().disk_bytes, guard.data)
    return 0
