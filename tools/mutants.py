"""Plant small faults in EDL, one at a time, and count how many the tests catch.

    python tools/mutants.py list --seed 21 --count 100 FILE ... > mutants.json
    python tools/mutants.py run mutants.json --contexts DATABASE [--root CHECKOUT]

A mutant is a flipped comparison, a changed number or truth value, or a removed branch. `run` plants each in turn in a
checkout and runs the tests that execute its line, which it looks up in a coverage database that has one context per
test (`pytest --cov --cov-context=test` writes one). To compare two sets of tests, run the same list in a checkout of
each.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
MOST_TESTS = 60
"""Enough to notice a fault in a line that many tests execute. The tests that execute the fewest files come first."""
TIMEOUT_S = 240
"""Longer than that many tests take. A mutant that hangs them is noticed, so it counts as caught."""


def mutants(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Change the tree into each of its mutants in turn, yielding the kind and the line, and back again."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in FLIPPED:
            kept_ops, node.ops = node.ops, [FLIPPED[type(node.ops[0])](), *node.ops[1:]]
            yield "comparison", node.lineno
            node.ops = kept_ops
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            value, node.value = node.value, not node.value if isinstance(node.value, bool) else node.value + 1
            yield "constant", node.lineno
            node.value = value
        elif isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            body, node.body = node.body, [ast.Pass()]
            yield "branch", body[0].lineno
            node.body = body


def choose(files: list[str], count: int, seed: int) -> list[dict[str, Any]]:
    """Return a sample of the mutants in the bodies of the files' functions."""
    found = []
    for file in files:
        tree = ast.parse(Path(file).read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        bodies = {line for node in functions for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)}
        found += [
            {"file": file, "number": number, "kind": kind, "line": line}
            for number, (kind, line) in enumerate(mutants(tree))
            if line in bodies
        ]
    return random.Random(seed).sample(found, min(count, len(found)))


def tests_of(database: str, path: Path, line: int) -> list[str]:
    """Return the tests that execute a line, those that execute the fewest files first, at most `MOST_TESTS`."""
    with contextlib.closing(sqlite3.connect(database)) as opened:
        rows = opened.execute(
            "SELECT context, numbits, (SELECT count(*) FROM line_bits b WHERE b.context_id = line_bits.context_id) "
            "FROM line_bits JOIN context ON context.id = context_id JOIN file ON file.id = file_id WHERE path = ?",
            (str(path),),
        ).fetchall()
    tests: dict[str, int] = {}
    for context, bits, files in rows:
        if "::" in context and line // 8 < len(bits) and bits[line // 8] >> line % 8 & 1:
            tests[context.partition("|")[0]] = files
    return sorted(tests, key=lambda test: (tests[test], test))[:MOST_TESTS]


def try_mutant(mutant: dict[str, Any], root: Path, database: str) -> str:
    """Return "caught", "missed", or "no test" where no test executes the line."""
    path = (root / mutant["file"]).resolve()
    tests = tests_of(database, path, mutant["line"])
    if not tests:
        return "no test"
    source = path.read_text()
    tree = ast.parse(source)
    changed = next(ast.unparse(tree) for number, _ in enumerate(mutants(tree)) if number == mutant["number"])
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *tests]
    try:
        path.write_text(changed)
        # Also where the environment has EDL installed from another checkout.
        places = f"{root.resolve()}:{root.resolve() / 'serving'}"
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": places}
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return "caught" if process.wait(TIMEOUT_S) else "missed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "caught"
    finally:
        path.write_text(source)


def main() -> None:
    """List mutants, or try them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list")
    listing.add_argument("files", nargs="+")
    listing.add_argument("--seed", type=int, default=0)
    listing.add_argument("--count", type=int, default=100)
    running = commands.add_parser("run")
    running.add_argument("mutants", type=Path)
    running.add_argument("--contexts", required=True)
    running.add_argument("--root", type=Path, default=Path())
    options = parser.parse_args()
    if options.command == "list":
        print(json.dumps(choose(options.files, options.count, options.seed), indent=0))
        return
    results: Counter[str] = Counter()
    for mutant in json.loads(options.mutants.read_text()):
        result = try_mutant(mutant, options.root, options.contexts)
        results[result] += 1
        print(f"{result:8} {mutant['file']}:{mutant['line']} {mutant['kind']} {mutant['number']}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in results.most_common()))


if __name__ == "__main__":
    main()
