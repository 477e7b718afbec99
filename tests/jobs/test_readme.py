"""Every code block of README.md is run, in order, in one folder, as a reader of it would; and those of the docs."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from edl.cli import main
from edl.discovery import open_registry
from tests.jobs.forks import Forks
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, language, text and first line in the page."""

    page: str
    language: str
    text: str
    line: int

    @property
    def file_name(self) -> str | None:
        """The name in a first line such as `# teacher.py`."""
        named = re.match(r"# (\w+\.py)\n", self.text)
        return named[1] if named else None

    def __str__(self) -> str:
        return f"{self.page}-line{self.line}"


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    return [
        Block(path.name, match[1], match[2], text[: match.start()].count("\n") + 1)
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


BLOCKS = blocks(README)
OF_THEIR_OWN = ("quickstart.md", "security.md", "kubernetes.md")  # blocks need those before: below, tests/kubernetes
IN_DOCS = [block for page in PAGES if page != README and page.name not in OF_THEIR_OWN for block in blocks(page)]
PYTHON = [
    block
    for block in BLOCKS + IN_DOCS
    if block.language == "python" and block.file_name is None and block.page != "master.md"  # see master/test_page.py
]
COMMANDS = [block for block in BLOCKS if block.language == "bash"]


# What most blocks import.
IMPORTS = """
import contextlib, numpy, torch, edl.collective, edl.distill.torch

with contextlib.suppress(ImportError):
    import sklearn.datasets, transformers, edl.distill.transformers
"""


class Workshop:
    """A folder, an environment, and the servers that the reader of the README has started."""

    def __init__(self, folder: Path, discovery: str, stack: contextlib.ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self._forks: Forks | None = None
        self.environ = {**os.environ, "EDL_DISCOVERY": discovery}
        for block in BLOCKS:
            if block.file_name is not None:
                folder.joinpath(block.file_name).write_text(block.text)
        np.savez(folder / "digits.npz", x=np.zeros((64, 1, 8, 8), np.float32))

    def run(self, *command: str) -> str:
        done = subprocess.run(command, cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, f"{shlex.join(command)}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def run_python(self, text: str) -> None:
        """Run a block as `python -c` does."""
        if self._forks is None:
            self._forks = Forks(IMPORTS)
            self._stack.callback(self._forks.close)
        self._forks.run(text, self.folder, self.folder / "output", self.environ)

    def serve(self, arguments: list[str]) -> None:
        """Start `edl serve` and wait until its service is found where students look."""
        service = arguments[arguments.index("--service") + 1]
        log = self.folder / f"{service}.log"
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "edl", *arguments], cwd=self.folder, env=self.environ, stdout=file, stderr=file
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        with open_registry(self.environ["EDL_DISCOVERY"]) as registry:

            def found() -> bool:
                assert process.poll() is None, log.read_text()
                return bool(registry.snapshot(service).instances)

            wait_until(found, f"{service} is found")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    folder = tmp_path_factory.mktemp("readme")
    with contextlib.ExitStack() as stack:
        workshop = Workshop(folder, f"sqlite:///{folder}/discovery.sqlite", stack)
        for block in COMMANDS:
            for line in block.text.splitlines():
                if line.startswith("edl serve"):
                    workshop.serve(shlex.split(line)[1:])
        yield workshop


def test_every_block_is_of_a_known_kind() -> None:
    assert {block.language for block in BLOCKS} == {"python", "bash", "console"}
    assert len(PYTHON) >= 4
    known = r"(make \w+|edl (serve|teachers) ?.*)"
    for block in COMMANDS:
        for line in block.text.splitlines():
            assert re.fullmatch(known, line), f"README.md, block at line {block.line}: no test runs {line!r}"


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python(block: Block, workshop: Workshop) -> None:
    for package in ("torch", "sklearn"):
        if re.search(rf"^(import|from) {package}", block.text, re.MULTILINE):
            pytest.importorskip(package, reason=f"the block needs {package}")
    if "import keras" in block.text and find_spec("keras") is None:
        pytest.skip("the block needs Keras")
    workshop.run_python(block.text)


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_commands(block: Block, workshop: Workshop) -> None:
    for line in block.text.splitlines():
        program, *arguments = shlex.split(line)
        if program == "make":  # `make demo` and `make test` run for long, and one of them runs this: see test_demo
            assert workshop.run("make", "-C", str(ROOT), "--dry-run", *arguments)
        elif arguments[0] != "serve":  # those were started for everybody
            assert workshop.run(sys.executable, "-m", "edl", *arguments)


@pytest.mark.parametrize("block", [block for block in IN_DOCS if block.language == "bash"], ids=str)
def test_commands_of_the_docs(block: Block, workshop: Workshop) -> None:
    """Those that only look, or label, are run; models to serve are the reader's own, so there the flags are checked."""
    for line in block.text.splitlines():
        program, *arguments = shlex.split(line)
        if program == "make":
            assert workshop.run("make", "-C", str(ROOT), "--dry-run", *arguments)
        elif arguments[0] in ("teachers", "label"):
            workshop.run(sys.executable, "-m", "edl", *arguments)
        elif program == "curl":  # of the page, whose answers its own tests look at
            assert "localhost:8650/api/state" in line, f"no test looks at {line!r}"
        else:
            assert program == "edl"
            looked_at = ("dashboard", "master", "store", "serve", "register", "run", "status", "report")
            assert arguments[0] in looked_at, f"no test looks at {line!r}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", ["quickstart.md", "security.md"])
def test_page_from_first_to_last(page: str, tmp_path: Path) -> None:
    """Write the files of a page, and run its other blocks in order, except those of a console."""
    commands = f'edl() {{ {sys.executable} -m edl "$@"; }}\npython() {{ {sys.executable} "$@"; }}\n'
    ran = 0
    with contextlib.ExitStack() as stack:
        workshop = Workshop(tmp_path, f"sqlite:///{tmp_path}/discovery.sqlite", stack)
        for block in blocks(ROOT / "docs" / page):
            if block.file_name is not None:
                tmp_path.joinpath(block.file_name).write_text(block.text)
            elif block.text.startswith("edl serve"):
                workshop.serve(shlex.split(block.text)[1:])
            elif block.language == "python":
                workshop.run(sys.executable, "-c", block.text)
            elif block.language != "console":
                workshop.run("bash", "-euo", "pipefail", "-c", commands + block.text)
            ran += block.language != "console"
    assert ran >= 4


@functools.cache
def flags_of(command: str) -> set[str]:
    shown = io.StringIO()
    # Engines have their own.
    for words in (command.split(), *([["register", "vllm://"]] if command == "register" else [])):
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            main([*words, "--help-all"])
    return set(re.findall(r"--[a-z][a-z-]*", shown.getvalue()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_flags_exist(page: Path) -> None:
    for command, rest in re.findall(r"\bedl ([a-z]+)((?: [^`\n]*)?)", page.read_text()):
        own = re.sub(r"'[^']*'|\"[^\"]*\"", "", rest) if command == "submit" else rest  # in quotes is another's
        for flag in re.findall(r"(?<=\s)--[a-z][a-z-]*", own):
            assert flag in flags_of(command), f"{page.name}: `edl {command}` has no {flag}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_are_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"
