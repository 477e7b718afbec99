"""`edl label`: write soft labels for a whole data set, ahead of time, alone or (`label_job`) as part of a job."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn

from edl.cli.output import counted, open_progress
from edl.command_line import CommandParser, at_least, duration, split_names
from edl.datasets import LabelDataset, open_data
from edl.datasets.rows import RaggedData
from edl.distill.cache import CacheKey, SoftLabelCache
from edl.distill.labelling import DataGuard, Labeller, LabelPlan, LabelProgress, note_files
from edl.distill.options import Options
from edl.distill.teachers import Teachers, teachers_from_env
from edl.distill.transport.schema import OutputSpec
from edl.errors import SettingsError
from edl.quoting import quote
from edl.settings import Credentials

_DESCRIPTION = """\
Asks teachers for the soft labels of a whole data set and writes them to a folder. A student that reads them with
SoftLabelCache(path=FOLDER), or with load_labels(FOLDER), needs no teachers. If the command is stopped or killed, run it
again to resume.

With --job NAME, the same command on several machines shares the run: each process takes shards of rows, and you may
kill or start any process at any moment. The processes need only a common store (--store): each of them can be the
master."""

_EXAMPLES = """\
examples:
  edl label digits.npz --service digits --inputs image=x --outputs logits --output labels
      the array "x" of an .npz file is the teachers' input "image"; a row's position is its id
  edl label train.py:dataset --teachers 10.0.0.7:8500,10.0.0.8:8500 --inputs image --outputs logits \\
      --output labels --workers 8 --dtype float16
      a PyTorch Dataset that the function dataset() in train.py returns; eight processes load its samples
  edl label digits.npz --service digits --inputs image=x --outputs logits --output labels --job digits-1 \\
      --store consul://10.0.0.7:8500
      on any number of machines, each with a folder of its own"""

_MORE_EXAMPLES = """\
more examples:
  edl label words.py:rows --service digits --inputs x --outputs logits --output labels --top-k 50 --temperature 2
      the 50 largest logits of each row, and the mass of the rest, for a loss at temperature 2
  edl label corpus.jsonl --service lm --inputs ids=input_ids --ids id --outputs logprobs --top-k 64 --output labels
      sequences of tokens for a language model; each line is like {"id": "a-1", "input_ids": [5, 3, 9]}. A .parquet
      file has these fields as columns, with input_ids as lists. Row t of the labels predicts token t + 1
  edl label corpus.npz --service lm --inputs ids=tokens --offsets begins --outputs logprobs --top-k 64 --output labels
      "tokens" holds the tokens of all sequences back to back; "begins" holds each sequence's first position, then the
      total number of tokens: 0, 4, 6, 11 for three sequences of 4, 2 and 5 tokens"""


def main(argv: Sequence[str]) -> int:
    """Run `edl label`."""
    options = parser().parse_args(argv)
    _check_job(options)
    plan = plan_of(options)
    files = note_files(options.data, options.ids)
    data = open_data(
        options.data,
        split_names(options.inputs),
        options.ids,
        options.workers,
        sequences=options.sequences,
        offsets=options.offsets,
    )
    new = not Path(options.output).exists()
    half: Any = "float16" if options.dtype == "float16" else None  # for servers that cannot send float16
    try:
        with SoftLabelCache(0, options.output, store_dtype=half) as cache:
            if options.job is None:
                return _label_all(options, DataGuard(data, files), plan, cache)
            from edl.cli.label_job import run_job  # here, because it imports the packages of a master

            return run_job(options, DataGuard(data, files, compare_rows=not options.no_data_check), plan, cache)
    except BaseException:
        if new:
            with contextlib.suppress(OSError):  # it has files, or was not created
                Path(options.output).rmdir()
        raise


def _label_all(options: argparse.Namespace, guard: DataGuard, plan: LabelPlan, cache: SoftLabelCache) -> int:
    with contextlib.closing(Labeller(guard, plan, cache)) as labeller:
        with open_screen() as screen:

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


def parser() -> CommandParser:
    """Return the parser of the command's arguments."""
    found = CommandParser("edl label", _DESCRIPTION, _EXAMPLES, _MORE_EXAMPLES)
    add = found.add_argument
    data = "FILE.npz, .npy, .jsonl or .parquet; FILE.py:FACTORY or MODULE:FACTORY (a Dataset or iterable)"
    add("data", metavar="DATA", help=data)
    add("--inputs", required=True, metavar="NAME[=KEY],…", help="inputs of the teachers, and their names in DATA")
    add("--outputs", required=True, metavar="NAME,…", help="outputs of the teachers to keep")
    add("--output", required=True, metavar="FOLDER", help="folder for the labels; created if missing")
    add("--ids", metavar="KEY", help="name of the samples' ids in DATA (default: a row's position is its id)")
    add("--top-k", type=int, metavar="K", help="keep only the K largest logits, and the mass of the rest")
    add("--temperature", type=float, default=1.0, metavar="T", help="student's temperature, for --top-k (default: 1)")
    add("--dtype", choices=("float16", "float32"), help="type of floating-point outputs (default: the teachers')")
    found.add_store_option("where teachers and the processes of a job meet")
    add = found.add_argument_group("teachers (default: those of EDL_SERVICE or EDL_TEACHERS)").add_argument
    add("--service", metavar="NAME", help="name under which the teachers register")
    add("--teachers", metavar="HOST:PORT,…", help="addresses of the teachers")
    add = found.add_argument_group("many machines (docs/master.md)").add_argument
    add("--job", metavar="NAME", help="share the run with all commands that name this job")
    add = found.add_advanced_group("more about the teachers").add_argument
    add("--teacher-store", metavar="URL", help="where teachers register, if not in --store")
    add("--model", default="", metavar="NAME", help="model to use if the teachers serve several")
    add("--model-version", default="", metavar="V", help="use only this version of the model (default: the newest)")
    wait = "how long to wait for a live teacher (default: 60s)"
    add("--timeout", type=duration(), default=60.0, metavar="TIME", help=wait)
    add = found.add_advanced_group("more about the data and the labels").add_argument
    add("--dataset", default="", metavar="TAG", help="tag to tell data sets and augmentations in one folder apart")
    add("--relabel", action="store_true", help="relabel all rows if FOLDER has labels for data other than DATA")
    add("--offsets", metavar="KEY", help="sequences (docs/tokens.md): .npz array of their start positions")
    add("--sequences", action="store_true", help="the function's samples are sequences [tokens] of varying length")
    batch = "rows per request, or sequences to read at once for requests of 2,048 tokens (default: 32)"
    add("--batch", type=at_least(1), default=32, metavar="ROWS", help=batch)
    add("--workers", type=int, default=0, metavar="N", help="processes that load samples of a Dataset (default: 0)")
    title = "more about many machines; a job uses the --shard and --worker-timeout of its first process"
    add = found.add_advanced_group(title).add_argument
    add("--shard", type=at_least(1), metavar="ROWS", help="rows that a process takes at a time (default: 32 to 1024)")
    silence = "silence after which a process's shards go to other processes (default: 10s)"
    add("--worker-timeout", type=duration(1), default=10.0, metavar="TIME", help=silence)
    host = "address to listen on as a master (default: all addresses, or 127.0.0.1 if the store is a file)"
    add("--host", metavar="ADDRESS", help=host)
    no_check = "accept rows that differ between processes, as decoded data may; the row count is still compared"
    add("--no-data-check", action="store_true", help=no_check)
    add("--retry-poisoned", action="store_true", help="retry rows that no process could label")
    found.add_credentials("client", "teachers")
    return found


def plan_of(options: argparse.Namespace) -> LabelPlan:
    """Return the plan of the labels to request."""
    if options.temperature != 1 and options.top_k is None:
        raise SettingsError(f"--temperature {options.temperature:g} requires --top-k: it is only for top-k labels")
    return LabelPlan(
        teachers=_teachers(options),
        output_spec=OutputSpec(
            outputs=tuple(split_names(options.outputs)),
            top_k=options.top_k,
            temperature=options.temperature,
            dtype=options.dtype,
            version=options.model_version,
        ),
        dataset=options.dataset,
        batch_rows=options.batch,
        options=Options(teacher_timeout_s=options.timeout, credentials=Credentials.of_options(vars(options))),
    )


def _check_job(options: argparse.Namespace) -> None:
    """Refuse job options that are invalid, or that are given without `--job`."""
    if options.job is not None:
        if not re.fullmatch(r"[^/]{1,100}", options.job):
            raise SettingsError(f"--job {quote(options.job)}: expected 1 to 100 characters without a slash")
        if options.relabel:
            raise SettingsError("--relabel cannot be combined with --job: name an --output folder without labels")
        return
    for name in ("--shard", "--host", "--retry-poisoned", "--no-data-check"):
        if getattr(options, name[2:].replace("-", "_")):
            raise SettingsError(f"{name} applies only to a run of several processes: name the run with --job")


def _teachers(options: argparse.Namespace) -> Teachers:
    if options.service and options.teachers:
        raise SettingsError("--service and --teachers cannot be combined")
    if options.service:
        return Teachers(options.service, discovery=options.teacher_store or options.store, model=options.model)
    if options.teachers:
        return Teachers(endpoints=tuple(split_names(options.teachers)), model=options.model)
    found = teachers_from_env(optional=True)
    if not found:
        raise SettingsError("no teachers named: pass --service or --teachers, or set EDL_SERVICE")
    return replace(
        found[0], model=options.model, discovery=options.teacher_store or options.store or found[0].discovery
    )


# --- Output ---

Screen: TypeAlias = Callable[[int, int | None, float, float | None, str], None]
"""Shows progress: rows done, total rows, rows per second, seconds left, and the workers or teachers."""


@contextlib.contextmanager
def open_screen() -> Iterator[Screen]:
    """Show progress on standard error."""
    ends = MofNCompleteColumn(), TextColumn("{task.description}")

    def write_line(done: int, total: int | None, words: str) -> None:
        of_all = f" of {total:,}" if total is not None else ""
        print(f"{done:,}{of_all} rows, {words}", file=sys.stderr, flush=True)

    with open_progress(Console(stderr=True), (SpinnerColumn(), BarColumn(None), *ends), write_line) as show:

        def tell(done: int, total: int | None, rows_per_s: float, left_s: float | None, who: str) -> None:
            left = [f"{left_s / 60:.0f} min left" if left_s >= 120 else f"{left_s:.0f} s left"] if left_s else []
            show(done, total, ", ".join([f"{rows_per_s:,.0f} rows/s", who, *left]))

        show(0, None, "waiting for teachers")
        yield tell


def print_outcome(progress: LabelProgress, key: CacheKey, folder: str, nbytes: int, data: LabelDataset) -> None:
    """Print the outcome of a run in a single process."""
    kind = kind_of(data)
    print(
        f"{progress.labelled:,} {kind} labelled by {model_of(key)} in {progress.seconds:.1f} s "
        f"({progress.rows_per_s:,.0f} {kind}/s); {progress.known:,} already had a label"
    )
    if isinstance(data, RaggedData) and data.empty:
        print(f"{data.empty:,} of {data.rows:,} sequences are empty and have no label")
    print(f"{folder}: {nbytes / 1e6:,.1f} MB")
    print_use(key, [folder], data)


def print_use(key: CacheKey, folders: Sequence[str], data: LabelDataset) -> None:
    """Print code that reads the labels in these folders."""
    read = "padded(ids, attention_mask)" if data.sequences else "rows(ids)"
    dataset = f", dataset={key.dataset!r}" if key.dataset else ""
    top_k = f", top_k={key.top_k}, temperature={key.temperature:g}" if key.top_k is not None else ""
    dtype = f", dtype={key.dtype!r}" if key.dtype else ""
    path, where = repr(folders[0]), repr(folders[0])
    if len(folders) == 1:
        print("To read the labels in a DistillReader, by the same ids:")
    else:
        path, where = "'TOGETHER'", f"[{', '.join(map(repr, folders))}]"
        print("For a DistillReader, copy all folders into one: SoftLabelCache(path='TOGETHER').add_folder(FOLDER)")
    print(f"  DistillReader(…, cache=SoftLabelCache(path={path}), id_field=…{dataset}{top_k}{dtype})")
    print("Without a DistillReader" + (", from their current folders:" if len(folders) > 1 else ":"))
    print(f"  edl.distill.cache.load_labels({where}).{read}[{key.outputs[0]!r}]")


def kind_of(data: LabelDataset) -> str:
    """Return "sequences" or "rows"."""
    return "sequences" if data.sequences else "rows"


def model_of(key: CacheKey) -> str:
    """Return the model's name and version."""
    return f"{key.model} version {key.version}" if key.version else key.model
