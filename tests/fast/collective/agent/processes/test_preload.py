"""What is imported ahead of time: only where it changes nothing, and where a fork does not break it."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from edl.collective.agent.processes import preload as preload_module
from edl.collective.agent.processes.preload import find_fork_hazard, preload_modules
from edl.collective.agent.processes.program_imports import ProgramImports, scan_imports
from tests.waiting import DEADLINE_S

ROOTS = ("torch", "numpy", "edl")


def scan(folder: Path, source: str, **own: str) -> ProgramImports:
    """What is found in a script with these modules beside it."""
    for name, text in own.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    script = folder / "train.py"
    script.write_text(textwrap.dedent(source))
    return scan_imports([script], [folder], ROOTS)


def test_imports_before_statements_are_found(tmp_path: Path) -> None:
    found = scan(
        tmp_path,
        """
        '''A program.'''
        from __future__ import annotations
        import argparse, os
        import warnings
        warnings.filterwarnings("ignore")
        EPOCHS = 3
        from dataclasses import dataclass
        @dataclass
        class Options:
            lr: float = 0.1
        def helper(x=1): os.environ["A"] = "1"
        if TYPE_CHECKING:
            import torch.never
        try:
            import numpy as np
        except ImportError:
            np = None
        from torch.utils.data import DataLoader, Dataset
        from edl.collective import State
        import elsewhere
        print("an effect")
        import torch.nn.functional as F
        """,
    )
    assert found.modules == (
        ("numpy", ""), ("torch.utils.data", "DataLoader"), ("torch.utils.data", "Dataset"), ("edl.collective", "State"),
    )  # fmt: skip
    assert found.framework
    assert found.obstacle == ""


def test_another_edl_is_left_to_workers(tmp_path: Path) -> None:
    found = scan(tmp_path, "import torch\nfrom edl.collective import State\n", edl__collective="State = 1")
    assert found.modules == (("torch", ""),), "the program has a package of that name of its own"


@pytest.mark.parametrize(
    "effect",
    [
        'os.environ["OMP_NUM_THREADS"] = "1"',
        "args = parser.parse_args()",
        "for name in names: setup(name)",
        "with context(): pass",
        "del os.environ['A']",
        "if setup(): pass",
        "@register\ndef f(): pass",
        "class A(make()): pass",
        "def f(x=make()): pass",
        "x: int = make()",
        "os.x = 1",
        "assert check()",
        "[y := 1]",
    ],
)
def test_effects_are_obstacles(tmp_path: Path, effect: str) -> None:
    found = scan(tmp_path, f"import os, sys\nimport numpy\n{effect}\nimport torch\n")
    assert (found.obstacle, found.framework) == ("train.py, line 3", False)
    assert found.modules == (("numpy", ""),), "what stands before the statement is found all the same"


def test_obstacles_in_own_modules_are_found(tmp_path: Path) -> None:
    own = {"config": "import argparse\nP = argparse.ArgumentParser()\n", "lib__quiet": "X = 1", "lib____init__": ""}
    found = scan(tmp_path, "from lib import quiet\nimport config\nimport torch", **own)
    assert (found.obstacle, found.framework) == ("config.py, line 2", False)
    found = scan(tmp_path, "from lib import quiet\nimport torch\nimport config", **own)
    assert (found.obstacle, found.framework) == ("", True)
    found = scan(tmp_path, "def main():\n    import torch\nif __name__ == '__main__':\n    main()")
    assert (found.framework, found.obstacle) == (False, "train.py, line 4")


@pytest.mark.parametrize("source", ["def", "\0", ""])
def test_a_file_that_is_no_program(tmp_path: Path, source: str) -> None:
    assert scan(tmp_path, source) == ProgramImports()


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose modules can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, **files: str) -> list[tuple[str, str]]:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return [(name, "") for name in files]


def test_modules_that_a_fork_would_break(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload_module, "find_fork_hazard", str)  # the tests' own process has threads of OpenMP
    named = write(
        modules,
        e_fine="import os\nHOME = os.environ.get('HOME'); COPY = dict(os.environ); os.environ['E_SET'] = '1'",
        e_thread="import threading, time\nstop = threading.Event()\nthreading.Thread(target=stop.wait).start()",
        e_socket="import socket\nopened = socket.socket()",
        e_rank="import os\nRANK = os.getenv('LOCAL_RANK', '0')",
        e_rank_needed="import os\nRANK = os.environ['RANK']",
        e_broken="raise ValueError('odd')",
        e_unfit="raise SystemError",
    )
    try:
        done = preload_modules(named, without=("e_unfit",))
    finally:
        sys.modules["e_thread"].stop.set()
        sys.modules["e_socket"].opened.close()
    assert done.unfit == {
        "e_thread": "starts a thread",
        "e_socket": "opens a connection",
        "e_rank": "reads LOCAL_RANK",
        "e_rank_needed": "reads RANK",
    }
    assert done.failed == ["importing e_broken ahead of time failed (ValueError: odd)"]
    assert "e_fine" in sys.modules
    assert os.environ.pop("E_SET") == "1"
    assert type(os.environ).__name__ == "_Environ"


def test_threads_of_native_code_are_seen() -> None:
    before = preload_module._tasks()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert preload_module._has_new_threads(before)
    finally:
        stop.set()
        thread.join()


def test_an_openmp_pool_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a fork of a process with such a pool a parallel operation waits in vain; `torch.ones` stands for one."""
    parent, ones = os.getpid(), torch.ones
    monkeypatch.setattr(torch, "ones", lambda count: ones(count) if os.getpid() == parent else signal.pause())
    monkeypatch.setattr(preload_module, "_TEST_FORK_S", 0.2)
    assert "pool of threads" in find_fork_hazard()


def test_a_poisoned_cuda_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch._C._cuda_isInBadFork` here is a fake: in a fork it says what it says where CUDA's driver was touched."""
    parent = os.getpid()
    monkeypatch.setattr(torch._C, "_cuda_isInBadFork", lambda: os.getpid() != parent, raising=False)
    monkeypatch.setattr(preload_module, "_TEST_FORK_S", DEADLINE_S)
    assert not preload_module._is_cuda_poisoned(), "in the process itself CUDA works"
    assert find_fork_hazard() == "uses CUDA"
