"""`edl label`: soft labels for a whole data set, ahead of time."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edl.cli.label import arguments
from edl.cli.label.conclusion import print_report, print_use
from edl.cli.label.screen import Screen, ShownProgress, counted, open_screen
from edl.datasets import LabelDataset, open_data
from edl.distill.cache import SoftLabelCache
from edl.distill.labelling import LabelPlan, LabelProgress, label

__all__ = ["main"]

_FLUSH_S = 5.0
"""How often labels reach the disk: what a crash costs is asked for again."""


def main(argv: Sequence[str]) -> int:
    """Run `edl label`."""
    options = arguments.parser().parse_args(argv)
    arguments.check_job(options)
    plan = arguments.plan_of(options)
    data = open_data(
        options.data,
        arguments.input_names(options),
        options.ids,
        options.workers,
        sequences=options.sequences,
        offsets=options.offsets,
    )
    new = not Path(options.output).exists()
    half: Any = "float16" if options.dtype == "float16" else None  # also where a server does not know how to send it
    try:
        with SoftLabelCache(0, options.output, store_dtype=half, flush_interval_s=_FLUSH_S) as cache:
            if options.job is not None:
                from edl.cli.label.job import run_job  # which needs a master's packages

                return run_job(options, plan, data, cache)
            return _label_all(options, plan, data, cache)
    except BaseException:
        if new:
            with contextlib.suppress(OSError):  # it is not empty, or not there
                Path(options.output).rmdir()
        raise


def _label_all(options: argparse.Namespace, plan: LabelPlan, data: LabelDataset, cache: SoftLabelCache) -> int:
    folder: str = options.output
    with open_screen(plan.teachers.name, "waiting for teachers") as screen:
        report = label(data, plan, cache, lambda progress: _show(screen, progress), relabel=options.relabel)
    print_report(report, folder, cache.stats().disk_bytes, data)
    print_use(report.key, [folder], sequences=data.sequences)
    return 0


def _show(screen: Screen, progress: LabelProgress) -> None:
    done = progress.known + progress.labelled
    left_s = None
    if progress.total is not None and progress.labelled:
        left_s = (progress.total - done) / progress.rows_per_s
    teachers = counted(progress.teachers_live, "teacher")
    screen(ShownProgress(done, progress.total, progress.rows_per_s, left_s, teachers))
