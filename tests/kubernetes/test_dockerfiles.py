"""What can be checked of serving/docker without Docker: the context, the extras and the user."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "serving/docker").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _instructions(path: Path) -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(keyword, rest) for keyword, rest in lines]


def _stages(path: Path) -> list[list[tuple[str, str]]]:
    stages: list[list[tuple[str, str]]] = []
    for instruction in _instructions(path):
        if instruction[0] == "FROM":
            stages.append([])
        if stages:
            stages[-1].append(instruction)
    return stages


def _ignored(path: str) -> bool:
    """Whether the root's .dockerignore leaves a path out; the last pattern that fits decides, as in Docker."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip().lstrip("!")
        if not pattern or pattern.startswith("#"):
            continue
        expression = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if re.fullmatch(f"{expression}(/.*)?", path):
            ignored = not line.startswith("!")
    return ignored


def _sources(path: Path) -> list[str]:
    """What a Dockerfile copies from the context."""
    found = []
    for keyword, rest in _instructions(path):
        words = shlex.split(rest)
        if keyword == "COPY" and not any(word.startswith("--from") for word in words):
            found += words[:-1]
    return found


def test_context_has_no_more() -> None:
    assert [path.name.removesuffix(".Dockerfile") for path in FILES] == [
        *("operator", "student", "teacher-cpu", "teacher-cuda")
    ]
    for source in ("tests", ".git/config", ".venv/bin/python", ".tools", "edl/__pycache__/x.pyc", "shared"):
        assert _ignored(source), source


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_image_is_small_and_not_root(path: Path) -> None:
    sources = _sources(path)
    assert "edl" in sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not _ignored(source), f"{source}: .dockerignore leaves it out"
    (extras,) = re.findall(r'"\.\[(.+?)\]"', path.read_text())
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    final = _stages(path)[-1]
    assert [rest for keyword, rest in final if keyword == "USER"] == ["65532:65532"]
    assert not any(keyword in ("RUN", "ADD") for keyword, _ in final), "the final image has only the environment"
    assert [rest for keyword, rest in final if keyword == "COPY"] == ["--from=build /opt/edl /opt/edl"]
    for keyword, rest in _instructions(path):
        assert keyword != "FROM" or "latest" not in rest
        assert not re.search(r"(?i)token|password|secret", rest)
