"""The command line of `edl label`."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace

from edl.cli._credentials import add_credentials
from edl.distill.labelling import LabelPlan
from edl.distill.options import Options
from edl.distill.teachers import Teachers, teachers_from_env
from edl.distill.transport.schema import OutputSpec
from edl.errors import SettingsError
from edl.quoting import quote
from edl.settings import Credentials

__all__ = ["check_job", "input_names", "parser", "plan_of"]

_DESCRIPTION = """\
Asks teachers for the soft labels of a whole data set and writes them to a folder. A student that reads them with
SoftLabelCache(path=FOLDER), or with load_labels(FOLDER), asks teachers nothing. Stopped or killed, the same command
goes on where it was.

With --job NAME, the same command on several machines shares the run: each takes shards of rows, any may be killed, and
others started, at any moment. They need one store (--store), and nothing else runs: each of them can be the master."""

_EXAMPLES = """\
examples:
  edl label digits.npz --service digits --inputs image=x --outputs logits --output labels
      the array "x" of an .npz file is the teachers' input "image"; a row's position is its id
  edl label train.py:dataset --teachers 10.0.0.7:8500,10.0.0.8:8500 --inputs image --outputs logits \\
      --output labels --workers 8 --dtype float16
      a PyTorch Dataset that the function dataset() in train.py returns; eight processes load its samples
  edl label words.py:rows --service digits --inputs x --outputs logits --output labels --top-k 50 --temperature 2
      the 50 largest logits of each row, and the mass of the rest, for a loss at temperature 2
  edl label corpus.jsonl --service lm --inputs ids=input_ids --ids id --outputs logprobs --top-k 64 --output labels
      sequences of tokens for a language model: on each line {"id": "a-1", "input_ids": [5, 3, 9]}. A .parquet file has
      the same as columns, input_ids as lists. Row t of the labels is the prediction of token t + 1
  edl label corpus.npz --service lm --inputs ids=tokens --offsets begins --outputs logprobs --top-k 64 --output labels
      "tokens" are those of all sequences behind one another, "begins" where each begins, and behind the last the number
      of all: for three sequences of 4, 2 and 5 tokens 0, 4, 6, 11. With --sequences, a Dataset of your own
  edl label digits.npz --service digits --inputs image=x --outputs logits --output labels --job digits-1 \\
      --store consul://10.0.0.7:8500
      on as many machines as you like, into a folder that they share, or each into its own"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    found = argparse.ArgumentParser(
        prog="edl label",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add(
        "data",
        metavar="DATA",
        help="FILE.npz, .npy, .jsonl or .parquet; FILE.py:FACTORY or MODULE:FACTORY (a Dataset or iterable)",
    )
    add("--inputs", required=True, metavar="NAME[=KEY],…", help="the teachers' inputs, and what DATA calls them")
    add("--outputs", required=True, metavar="NAME,…", help="the teachers' outputs to keep")
    add("--output", required=True, metavar="FOLDER", help="where the labels go; made if it is missing")
    add = found.add_argument_group("teachers (default: what EDL_SERVICE or EDL_TEACHERS say)").add_argument
    add("--service", metavar="NAME", help="those that register under this name")
    add("--teachers", metavar="HOST:PORT,…", help="these")
    add(
        "--discovery",
        metavar="URL",
        help="where the teachers of --service register, if not in --store",
    )
    add("--model", default="", metavar="NAME", help="of several models that they serve, this one")
    add("--model-version", default="", metavar="V", help="labels of this version of it only (default: the newest)")
    add("--timeout", type=float, default=60.0, metavar="S", help="give up when none is live for so long (default: 60)")
    add_credentials(found)
    add = found.add_argument_group("labels").add_argument
    add("--top-k", type=int, metavar="K", help="only the K largest logits, with the mass of the rest")
    add("--temperature", type=float, default=1.0, metavar="T", help="of the student's loss; with --top-k (default: 1)")
    add("--dtype", choices=("float16", "float32"), help="of floating-point outputs (default: as teachers give them)")
    add("--ids", metavar="KEY", help="what holds the samples' ids (default: a row's position is its id)")
    add("--dataset", default="", metavar="TAG", help="tells data sets and augmentations in one folder apart")
    add("--relabel", action="store_true", help="label all rows again if FOLDER has labels of other data than DATA")
    add = found.add_argument_group("sequences of tokens (docs/tokens.md)").add_argument
    add("--offsets", metavar="KEY", help="in an .npz file: the array of where each sequence begins, and the last ends")
    add("--sequences", action="store_true", help="each sample of a function is a sequence [tokens], of its own length")
    add = found.add_argument_group("speed").add_argument
    add(
        "--batch",
        type=int,
        default=32,
        metavar="ROWS",
        help="rows of one request (default: 32); sequences that are read at a time: their requests have 2,048 tokens",
    )
    add("--workers", type=int, default=0, metavar="N", help="processes that load samples of a Dataset (default: 0)")
    _add_job(found)
    return found


def _add_job(found: argparse.ArgumentParser) -> None:
    add = found.add_argument_group("many machines (docs/master.md)").add_argument
    add("--job", metavar="NAME", help="share the run with all that name this job; each row is labelled by one of them")
    add(
        "--store",
        metavar="URL",
        help="where teachers and the run's processes meet: sqlite:///path (of one machine), edl://host:port, "
        "consul://host:port or etcd://host:port (default: EDL_DISCOVERY, or your file)",
    )
    add("--shard", type=int, metavar="ROWS", help="rows that a worker takes at a time; the first worker's (32 to 1024)")
    add(
        "--worker-timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="a worker silent for so long is lost, and others get its shards; the first worker's (default: 10)",
    )
    add(
        "--host",
        metavar="ADDRESS",
        help="where this process listens as a master (default: all addresses, ::, with a warning where there is no "
        "--token-file; 127.0.0.1 where the store is a file)",
    )
    add(
        "--no-data-check",
        action="store_true",
        help="rows may differ in a bit, as decoders do; not in number",
    )
    add("--retry-poisoned", action="store_true", help="try rows again that no worker could label")


def plan_of(options: argparse.Namespace) -> LabelPlan:
    """Return what to ask teachers for.

    Raises:
        SettingsError: options that cannot be.
    """
    return LabelPlan(
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


def input_names(options: argparse.Namespace) -> list[str]:
    """Return the names of inputs, with what the data set calls them."""
    return _names(options.inputs)


def check_job(options: argparse.Namespace) -> None:
    """Check the options that belong to a job.

    Raises:
        SettingsError: one of them is wrong, or is there without a job.
    """
    if options.shard is not None:
        _at_least_one("--shard", options.shard)
    if not options.worker_timeout >= 1:
        raise SettingsError(f"--worker-timeout {options.worker_timeout:g}: must be at least 1 second")
    if options.job is not None and not re.fullmatch(r"[^/]{1,100}", options.job):
        raise SettingsError(f"--job {quote(options.job)}: expected 1 to 100 characters without a slash")
    if options.job is not None and options.relabel:
        raise SettingsError("--relabel does not go with --job: name an --output folder without labels")
    if options.job is None:
        alone = {"--shard": options.shard, "--host": options.host}
        given = [name for name, value in alone.items() if value] + ["--retry-poisoned"] * options.retry_poisoned
        given += ["--no-data-check"] * options.no_data_check
        if given:
            raise SettingsError(f"{given[0]} belongs to a run of several processes: name it with --job")


def _teachers(options: argparse.Namespace) -> Teachers:
    if options.service and options.teachers:
        raise SettingsError("--service and --teachers exclude each other")
    if options.service:
        return Teachers(options.service, discovery=options.discovery or options.store, model=options.model)
    if options.teachers:
        return Teachers(endpoints=tuple(_names(options.teachers)), model=options.model)
    found = teachers_from_env(optional=True)
    if not found:
        raise SettingsError("no teachers named: pass --service or --teachers, or set EDL_SERVICE")
    return replace(found[0], model=options.model, discovery=options.discovery or found[0].discovery)


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise SettingsError(f"{name} {value}: must be at least 1")
    return value
