"""`edl label`: soft labels for a whole data set, ahead of time."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.progress import Progress as Bar
from rich.progress import TimeRemainingColumn as Remaining
from rich.text import Text

from edl.cli._credentials import add_credentials
from edl.distill.cache import SoftLabelCache
from edl.distill.datasets import open_data
from edl.distill.labelling import LabelPlan, LabelProgress, LabelReport, label
from edl.distill.options import Options
from edl.distill.teachers import Teachers, teachers_from_env
from edl.distill.transport.schema import OutputSpec
from edl.errors import SettingsError
from edl.settings import Credentials

__all__ = ["main"]

_FLUSH_S = 5.0
"""How often labels reach the disk: what a crash costs is asked for again."""
_LINE_EVERY_S = 5.0
"""Between two lines of progress where the output is a file or a pipe."""

_DESCRIPTION = """\
Asks teachers for the soft labels of a whole data set and writes them to a folder. A student that reads them with
SoftLabelCache(path=FOLDER), or with load_labels(FOLDER), asks teachers nothing. Stopped or killed, the same command
goes on where it was."""

_EXAMPLES = """\
examples:
  edl label digits.npz --service digits --inputs image=x --outputs logits --output labels
      the array "x" of an .npz file is the teachers' input "image"; a row's position is its id
  edl label train.py:dataset --teachers 10.0.0.7:8500,10.0.0.8:8500 --inputs image --outputs logits \\
      --output labels --workers 8 --dtype float16
      a PyTorch Dataset that the function dataset() in train.py returns; eight processes load its samples
  edl label corpus.py:texts --service lm --inputs ids,mask --outputs logits --output labels --top-k 50 --temperature 2
      the 50 largest logits of each row, and the mass of the rest, for a loss at temperature 2"""


def main(argv: Sequence[str]) -> int:
    """Run `edl label`."""
    options = _parser().parse_args(argv)
    plan = LabelPlan(
        teachers=_teachers(options),
        output_spec=OutputSpec(
            outputs=tuple(_names(options.outputs)),
            top_k=options.top_k,
            temperature=options.temperature,
            dtype=options.dtype,
            version=options.model_version,
        ),
        dataset=options.dataset,
        batch_rows=_at_least_one("--batch", options.batch),
        options=Options(teacher_timeout_s=options.timeout, credentials=Credentials.of_options(vars(options))),
    )
    data = open_data(options.data, _names(options.inputs), options.ids, options.workers)
    new = not Path(options.output).exists()
    half: Any = "float16" if options.dtype == "float16" else None  # also where a server does not know how to send it
    try:
        with SoftLabelCache(0, options.output, store_dtype=half, flush_interval_s=_FLUSH_S) as cache:
            with _shown(plan.teachers.name) as show:
                report = label(data, plan, cache, show)
            _tell(report, options.output, cache.stats().disk_bytes)
    except BaseException:
        if new:
            with contextlib.suppress(OSError):  # it is not empty, or not there
                Path(options.output).rmdir()
        raise
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="edl label",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("data", metavar="DATA", help="FILE.npz, FILE.npy, FILE.py:FACTORY or MODULE:FACTORY (a Dataset or iterable)")
    add("--inputs", required=True, metavar="NAME[=KEY],…", help="the teachers' inputs, and what DATA calls them")
    add("--outputs", required=True, metavar="NAME,…", help="the teachers' outputs to keep")
    add("--output", required=True, metavar="FOLDER", help="where the labels go; made if it is missing")
    add = parser.add_argument_group("teachers (default: what EDL_SERVICE or EDL_TEACHERS say)").add_argument
    add("--service", metavar="NAME", help="those that register under this name")
    add("--teachers", metavar="HOST:PORT,…", help="these")
    add("--discovery", metavar="URL", help="sqlite:///path, consul://host:port or etcd://host:port, with --service")
    add("--model", default="", metavar="NAME", help="of several models that they serve, this one")
    add("--model-version", default="", metavar="V", help="labels of this version of it only (default: the newest)")
    add("--timeout", type=float, default=60.0, metavar="S", help="give up when none is live for so long (default: 60)")
    add_credentials(parser)
    add = parser.add_argument_group("labels").add_argument
    add("--top-k", type=int, metavar="K", help="only the K largest logits, with the mass of the rest")
    add("--temperature", type=float, default=1.0, metavar="T", help="of the student's loss; with --top-k (default: 1)")
    add("--dtype", choices=("float16", "float32"), help="of floating-point outputs (default: as teachers give them)")
    add("--ids", metavar="KEY", help="what holds the samples' ids (default: a row's position is its id)")
    add("--dataset", default="", metavar="TAG", help="tells data sets and augmentations in one folder apart")
    add = parser.add_argument_group("speed").add_argument
    add("--batch", type=int, default=32, metavar="ROWS", help="rows of one request (default: 32)")
    add("--workers", type=int, default=0, metavar="N", help="processes that load samples of a Dataset (default: 0)")
    return parser


def _teachers(options: argparse.Namespace) -> Teachers:
    if options.service and options.teachers:
        raise SettingsError("--service and --teachers exclude each other")
    if options.service:
        return Teachers(options.service, discovery=options.discovery, model=options.model)
    if options.teachers:
        return Teachers(endpoints=tuple(_names(options.teachers)), model=options.model)
    try:
        (found,) = teachers_from_env()
    except SettingsError as exc:
        raise SettingsError("no teachers named: pass --service or --teachers, or set EDL_SERVICE") from exc
    return found


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise SettingsError(f"{name} {value}: must be at least 1")
    return value


@contextlib.contextmanager
def _shown(whom: str) -> Iterator[Callable[[LabelProgress], None]]:
    """Show progress on standard error: a bar in a terminal, else a line from time to time."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    columns: list[ProgressColumn] = [SpinnerColumn(), BarColumn(None), MofNCompleteColumn(), _Rate(), Remaining()]
    with Bar(*columns, TextColumn("{task.fields[teachers]}"), console=console) as bar:
        task = bar.add_task(whom, total=None, teachers="waiting for teachers")

        def show(progress: LabelProgress) -> None:
            done = progress.known + progress.labelled
            bar.update(task, completed=done, total=progress.total, teachers=_live(progress), rate=progress.rows_per_s)

        yield show


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.fields.get('rate', 0.0):,.0f} rows/s", "progress.data.speed")


class _Lines:
    def __init__(self) -> None:
        self._next = time.monotonic()

    def __call__(self, progress: LabelProgress) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LINE_EVERY_S
        done = progress.known + progress.labelled
        parts = [f"{done:,} of {progress.total:,} rows" if progress.total is not None else f"{done:,} rows"]
        parts += [f"{progress.rows_per_s:,.0f} rows/s", _live(progress)]
        if progress.total is not None and progress.labelled:
            left = (progress.total - done) / progress.rows_per_s
            parts.append(f"{left / 60:.0f} min left" if left >= 120 else f"{left:.0f} s left")
        print(", ".join(parts), file=sys.stderr, flush=True)


def _live(progress: LabelProgress) -> str:
    return f"{progress.teachers_live} teacher{'s' if progress.teachers_live != 1 else ''}"


def _tell(report: LabelReport, folder: str, nbytes: int) -> None:
    progress, key = report.progress, report.key
    version = f" version {key.version}" if key.version else ""
    print(
        f"{progress.labelled:,} rows labelled by {key.model}{version} in {progress.seconds:.1f} s "
        f"({progress.rows_per_s:,.0f} rows/s); {progress.known:,} had a label before"
    )
    print(f"{folder}: {nbytes / 1e6:,.1f} MB")
    dataset = f", dataset={key.dataset!r}" if key.dataset else ""
    top_k = f", top_k={key.top_k}, temperature={key.temperature:g}" if key.top_k is not None else ""
    dtype = f", dtype={key.dtype!r}" if key.dtype else ""
    print("A reader finds them, by the same ids, with")
    print(f"  DistillReader(…, cache=SoftLabelCache(path={folder!r}), id_field=…{dataset}{top_k}{dtype})")
    print("and a program without a reader with")
    print(f"  edl.distill.cache.load_labels({folder!r}).rows(ids)[{key.outputs[0]!r}]")
