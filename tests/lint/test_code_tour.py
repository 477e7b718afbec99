"""The code tour names files, classes and functions that exist, and no more files than a reader follows."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOUR = ROOT / "docs" / "code-tour.md"
MOST_FILES = {"A sample": 15, "A request": 12, "A state": 12, "A worker": 12}
"""Numbered files of a walk, by how its heading begins: what a reader keeps in mind."""

_QUOTED = re.compile(r"`([^`]+)`")
_ITEM = re.compile(r"^(?:\d+\.|-) ", re.MULTILINE)


class Walk(NamedTuple):
    """A section of the page: its heading, its numbered items, and all of its text."""

    heading: str
    items: list[str]
    text: str


def walks_of(page: str) -> list[Walk]:
    found = []
    for section in page.split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        starts = [match.start() for match in _ITEM.finditer(text)]
        items = [text[start:end] for start, end in itertools.pairwise([*starts, len(text)])]
        found.append(Walk(heading, [item for item in items if item[0].isdigit()], text))
    return found


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


def missing_in(walk: Walk) -> list[str]:
    """Return what a walk names in backticks that is not there."""
    files, names = quoted(walk.text)
    missing = [file for file in files if not (ROOT / file).is_file()]
    there = [file for file in files if file not in missing and file.endswith(".py")]
    return missing + [name for name in names if not is_defined(name, there)]


def test_what_the_tour_names_exists() -> None:
    page = TOUR.read_text()
    introduction, _ = quoted(page.split("\n## ")[0])
    assert [file for file in introduction if not (ROOT / file).is_file()] == []
    walks = walks_of(page)
    assert [walk.heading for walk in walks if missing_in(walk)] == [], [missing_in(walk) for walk in walks]
    assert sum(len(quoted(walk.text)[1]) for walk in walks) > 60, "names are found in the page"


@pytest.mark.parametrize("begin", MOST_FILES)
def test_a_walk_is_short(begin: str) -> None:
    (walk,) = [walk for walk in walks_of(TOUR.read_text()) if walk.heading.startswith(begin)]
    files = [quoted(item)[0][0] for item in walk.items]
    assert len(set(files)) == len(files), "a file has one item"
    assert 0 < len(files) <= MOST_FILES[begin]
    for file, item in zip(files, walk.items, strict=True):
        assert any(is_defined(name, [file]) for name in quoted(item)[1]), f"{file}: nothing of it is named"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("1. `tests/lint/test_code_tour.py`: `walks_of` and `Walk`.", []),
        ("1. `tests/lint/test_code_tour.py`: `no_such_function`.", ["no_such_function"]),
        ("1. `tests/lint/test_code_tour.py`: `Walk.no_such_method`.", ["Walk.no_such_method"]),
        ("1. `tests/unit/gone.py`: `walks_of`.", ["tests/unit/gone.py", "walks_of"]),
        ("It is `tests.lint.test_code_tour.Walk`, not `tests.fast.gone.Walk`.", ["tests.fast.gone.Walk"]),
    ],
)
def test_what_is_missing_is_found(text: str, missing: list[str]) -> None:
    (walk,) = walks_of(f"# Tour\n\n## A walk\n\n{text}\n")
    assert missing_in(walk) == missing
