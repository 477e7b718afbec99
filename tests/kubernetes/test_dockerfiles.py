"""What can be checked of serving/docker without Docker: the context, the extras, the user and the command."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
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


@pytest.fixture(scope="module")
def wheel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that an image has, made of what the Dockerfiles copy and nothing else, unpacked."""
    folder = tmp_path_factory.mktemp("image")
    context = folder / "src"
    context.mkdir()
    for source in sorted({source for path in FILES for source in _sources(path)}):
        target = context / source
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, target)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=context, check=True, capture_output=True, timeout=100)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder / "site")
    return folder / "site"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_command_starts(path: Path, wheel_folder: Path, tmp_path: Path) -> None:
    final = dict(_stages(path)[-1])
    entry, arguments = json.loads(final["ENTRYPOINT"]), json.loads(final["CMD"])
    module, function = PROJECT["scripts"][entry[0]].split(":")
    code = f"import sys; from {module} import {function} as run; sys.argv[0] = {entry[0]!r}; sys.exit(run())"
    done = subprocess.run(
        [sys.executable, "-c", code, arguments[0], "--help"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(wheel_folder), "HOME": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"usage: {entry[0]} {arguments[0]}" in done.stdout
