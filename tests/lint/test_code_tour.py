"""The code tour names files, classes and functions that exist."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOUR = ROOT / "docs" / "code-tour.md"

_QUOTED = re.compile(r"`([^`]+)`")


def quoted(text: str) -> tuple[list[str], list[str]]:
    """Return the files and the names in backticks."""
    found = _QUOTED.findall(text)
    return [token for token in found if "/" in token], [token for token in found if "/" not in token]


@functools.cache
def names_in(file: str) -> frozenset[str]:
    """Return classes, functions and methods that a file defines, methods as `Class.method`."""

    def define(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + node.name
                if isinstance(node, ast.ClassDef):
                    yield from define(node.body, f"{prefix}{node.name}.")

    return frozenset(define(ast.parse((ROOT / file).read_text()).body, ""))


def is_defined(name: str, files: list[str]) -> bool:
    """Whether one of the files defines a name, or the module that a dotted name begins with does."""
    if any(name in names_in(file) for file in files):
        return True
    parts = name.split(".")
    modules = [("/".join(parts[:end]) + ".py", ".".join(parts[end:])) for end in range(1, len(parts))]
    return any((ROOT / file).is_file() and rest in names_in(file) for file, rest in modules)


def missing_in(section: str) -> list[str]:
    """Return what a section names in backticks that is not there."""
    files, names = quoted(section)
    missing = [file for file in files if not (ROOT / file).is_file()]
    there = [file for file in files if file not in missing and file.endswith(".py")]
    return missing + [name for name in names if not is_defined(name, there)]


def test_what_the_tour_names_exists() -> None:
    introduction, *walks = TOUR.read_text().split("\n## ")
    assert [file for file in quoted(introduction)[0] if not (ROOT / file).is_file()] == []
    assert [missing for walk in walks for missing in missing_in(walk)] == []
    assert sum(len(quoted(walk)[1]) for walk in walks) > 60, "names are found in the page"
