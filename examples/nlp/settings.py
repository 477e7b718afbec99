"""The programs' command line options, and the results that they write."""

import argparse
import json
from pathlib import Path

CHECK_EVERY = 50
"""Steps between two evaluations on the development texts."""


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that must be the same for a teacher and its students."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--data", help="folder with train.tsv, dev.tsv and test.tsv (default: made-up sentences)")
    parser.add_argument("--labelled", type=int, default=100, help="texts whose labels the students see (%(default)s)")
    parser.add_argument("--unlabelled", type=int, default=500, help="texts that are used without labels (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="add a line of JSON to this file")
    return parser


def student_options(about: str | None, nets: list[str]) -> argparse.Namespace:
    """Return the options on a student's command line."""
    parser = parser_of(about)
    parser.add_argument("--net", choices=nets, default=nets[0], help="(%(default)s)")
    parser.add_argument("--teachers", help="a service, or the teachers' host:port (default: no teachers)")
    parser.add_argument("--store", "--discovery", help="URL of the store (default: EDL_DISCOVERY, or a local file)")
    parser.add_argument("--more-text", action="store_true", help="train on the texts without labels as well")
    parser.add_argument("--tokenizer", default="teacher", help="folder of the teacher's tokenizer (%(default)s)")
    parser.add_argument("--cache", action="store_true", help="keep the answers, to ask for each text only once")
    parser.add_argument("--steps", type=int, default=400)
    return parser.parse_args()


def keep(options: argparse.Namespace, **result: object) -> None:
    """Append a result to the --results file, if one is given."""
    if options.results:
        with options.results.open("a") as file:
            file.write(json.dumps({"seed": options.seed, **result}) + "\n")


def keep_student(options: argparse.Namespace, dev: float, test: float, asked: int) -> None:
    """Print a student's accuracy, and keep it."""
    print(f"{options.net}: {test:.1%} right, {asked:,} texts asked of teachers")
    taught = options.teachers is not None
    keep(options, model=options.net, taught=taught, more_text=options.more_text, dev=round(dev, 4), test=round(test, 4))
