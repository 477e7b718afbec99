"""Worker processes: what is imported ahead of time, forks, logs, stacks, and GPUs that are not free yet."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from edl.collective.agent.health.failures import read_error_file
from edl.collective.agent.processes import pool
from edl.collective.agent.processes import preload as preload_module
from edl.collective.agent.processes.pool import WorkerExit, WorkerProcesses, ZygoteLost
from edl.collective.agent.processes.preload import ProgramImports, find_fork_hazard, preload_modules, scan_imports
from edl.collective.agent.processes.stack_dump import dump_stacks
from edl.collective.agent.processes.zygote import ForkRequest, ProgramSpec
from edl.errors import EDLError
from tests.waiting import DEADLINE_S, wait_until

Events = queue.Queue[WorkerExit | ZygoteLost]


@contextlib.contextmanager
def workers_of(folder: Path, script: str) -> Iterator[tuple[WorkerProcesses, Events]]:
    (folder / "script.py").write_text(textwrap.dedent(script))
    heard: Events = queue.Queue()
    program = ProgramSpec("script", str(folder / "script.py"), ("x",), prewarm=False)
    workers = WorkerProcesses(program, heard.put)
    try:
        workers.warm_up()
        yield workers, heard
    finally:
        workers.close()


def stat(pid: int) -> list[str]:
    """Return the state of a process and what follows it, [] if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def wait_until_gone(*pids: int) -> None:
    wait_until(lambda: all(stat(pid)[:1] in ([], ["Z"]) for pid in pids), f"{pids} are gone")


SLEEPER = """
    import os, subprocess, sys
    child = subprocess.Popen(["sleep", "1000"])
    with open(os.environ["OUT"] + ".new", "w") as out:
        out.write(f"{os.getpid()} {child.pid}")
    os.rename(os.environ["OUT"] + ".new", os.environ["OUT"])
    child.wait()
"""


def pids_in(path: Path) -> list[int]:
    wait_until(path.exists, f"{path} exists")
    return [int(one) for one in path.read_text().split()]


def test_deadly_import_is_left_to_workers(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os\nos._exit(3)")
    (tmp_path / "script.py").write_text("begin()")
    workers = WorkerProcesses(ProgramSpec("script", str(tmp_path / "script.py"), preload=("deadly",)), print)
    with contextlib.closing(workers):
        workers.warm_up()
        assert "died while it imported (exit code 3" in workers.import_failures
        assert not workers.prewarmed


HOLDER = """
    import mmap, os, signal, subprocess
    from pathlib import Path

    def lives(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
        except OSError:
            return False

    out = Path(os.environ["OUT"])
    if "BEFORE" in os.environ:
        text = " ".join(str(lives(int(pid))) for pid in os.environ["BEFORE"].split())
    else:
        device = os.open(os.environ["DEVICE"], os.O_RDONLY)
        memory = mmap.mmap(-1, 100 << 20)  # which the kernel takes a while to take back
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for at in range(0, len(memory), 4096):
            memory[at] = 1
        child = subprocess.Popen(["sleep", "1000"], pass_fds=[device])
        text = f"{os.getpid()} {child.pid}"
    out.with_suffix(".new").write_text(text)
    out.with_suffix(".new").rename(out)
    signal.pause()
"""


@pytest.mark.parametrize(
    ("kind", "target", "words"),
    [("module", "no_such_module", "No module named no_such_module"), ("script", "ends.py", "no data in /x")],
)
def test_text_of_an_exit_is_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, target: str, words: str
) -> None:
    """Else an ElasticJob whose module does not exist has no cause in its status."""
    (tmp_path / "ends.py").write_text("import sys; sys.exit('no data in /x')")
    (tmp_path / "main.py").write_text(
        f"from edl.collective.agent.processes.zygote import run_main; run_main({kind!r}, {target!r}, ())"
    )
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error"))
    ended = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert read_error_file(tmp_path / "error") == ended.stderr.strip()
    assert words in ended.stderr


def test_worker_waits_for_gpu_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the place of a GPU's device: whoever has it open has ended before a new worker's first line."""
    device = tmp_path / "nvidia0"
    device.touch()
    monkeypatch.setattr(pool, "GPU_DEVICES", (str(tmp_path / "nvidia[0-9]*"),))
    with workers_of(tmp_path, HOLDER) as (workers, _):
        workers.fork_workers(0, {0: ForkRequest({"OUT": str(tmp_path / "out-0"), "DEVICE": str(device)})})
        before = pids_in(tmp_path / "out-0")
        environ = {"OUT": str(tmp_path / "out-1"), "BEFORE": " ".join(map(str, before))}
        workers.replace_workers(1, {0: ForkRequest(environ)})
        wait_until((tmp_path / "out-1").exists, "the new worker runs")
        assert (tmp_path / "out-1").read_text() == "False False"


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_zygote_takes_all_along(tmp_path: Path, signal_number: signal.Signals) -> None:
    with workers_of(tmp_path, SLEEPER) as (workers, heard):
        workers.fork_workers(0, {0: ForkRequest({"OUT": str(tmp_path / "out")})})
        pids = pids_in(tmp_path / "out")
        zygote = int(stat(pids[0])[1])
        os.kill(zygote, signal_number)
        if signal_number == signal.SIGKILL:
            assert isinstance(heard.get(timeout=DEADLINE_S), ZygoteLost)
            with pytest.raises(EDLError, match="died"):
                workers.fork_workers(1, {0: ForkRequest({"OUT": str(tmp_path / "out-2")})})
        else:
            workers.kill_workers(timeout_s=1.0)  # the zygote is given up in half of that
        wait_until_gone(zygote, *pids)


AGENT = """
    import os, signal, sys
    from edl.collective.agent.processes.pool import WorkerProcesses
    from edl.collective.agent.processes.zygote import ForkRequest, ProgramSpec
    workers = WorkerProcesses(ProgramSpec("script", sys.argv[1], prewarm=False), print)
    workers.warm_up()
    workers.fork_workers(0, {0: ForkRequest({"OUT": sys.argv[2]})})
    signal.pause()
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_killed_agent_takes_all_along(tmp_path: Path, stopped: bool) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SLEEPER))
    (tmp_path / "agent.py").write_text(textwrap.dedent(AGENT))
    agent = subprocess.Popen(
        [sys.executable, str(tmp_path / "agent.py"), str(tmp_path / "script.py"), "out"], cwd=tmp_path
    )
    try:
        pids = pids_in(tmp_path / "out")
        zygote = int(stat(pids[0])[1])
        if stopped:
            os.kill(zygote, signal.SIGSTOP)
    finally:
        agent.kill()
        agent.wait()
    wait_until_gone(zygote, *pids)


HANGS = """
import sys, pathlib, ctypes
from edl.collective.agent.processes.stack_dump import arm_stack_dump
libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)

def stuck():  # with the interpreter's lock, in native code
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

arm_stack_dump(pathlib.Path(sys.argv[1]))
print("armed", flush=True)
stuck()
"""


@contextlib.contextmanager
def worker(source: str, *arguments: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", source, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "armed\n"
            yield process.pid
        finally:
            process.kill()


def test_a_worker_that_hangs_shows_where(tmp_path: Path) -> None:
    """Also after a stop, in which it says that it is stopped; and it lives, until it has ended."""
    path = tmp_path / "stacks"
    with worker(HANGS, str(path)) as pid:
        wait_until(lambda: "in stuck" in dump_stacks([(pid, path)])[0], "it has come to where it hangs")
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: "T (stopped)" in dump_stacks([(pid, path)], timeout_s=0.5)[0], "it says so")
        os.kill(pid, signal.SIGCONT)

        def single() -> bool:
            text = dump_stacks([(pid, path)])[0]
            return text.count("Current thread") == 1 and "in stuck" in text

        wait_until(single, "an answer has the stacks of its own request only")
    assert dump_stacks([(pid, path)]) == [f"process {pid} has ended: it has no stack"]


def test_unarmed_worker_is_not_killed(tmp_path: Path) -> None:
    with worker("import signal\nprint('armed', flush=True)\nsignal.pause()") as pid:
        (text,) = dump_stacks([(pid, tmp_path / "stacks")])
        assert "has no handler yet" in text
        os.kill(pid, 0)


def test_signal_taken_by_the_script(tmp_path: Path) -> None:
    source = "import signal\nsignal.signal(signal.SIGUSR2, lambda *_: None)\nprint('armed', flush=True)\n"
    source += "while True: signal.pause()"
    with worker(source) as first, worker(source) as second:
        texts = dump_stacks([(first, tmp_path / "1"), (second, tmp_path / "2")], timeout_s=0.3)
        assert all("may use SIGUSR2 itself" in text for text in texts)


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


def test_packages_on_the_path_are_not_read(tmp_path: Path) -> None:
    """PYTHONPATH may name a folder of packages; reading one with thousands of files took minutes."""
    packages = tmp_path / "site-packages"
    big = packages / "big.py"
    big.parent.mkdir()
    big.write_text("import torch")
    script = tmp_path / "train.py"
    script.write_text("import big")
    assert scan_imports([script], [packages], ROOTS).modules == ()
    many = {f"m{number}": "" for number in range(600)}
    found = scan(tmp_path, "".join(f"import {name}\n" for name in [*many, "torch"]), **many)
    assert (found.obstacle, found.missed) == ("m499.py, after 500 other files", ("torch",))
    chain = {f"m{number}": f"import m{number + 1}" for number in range(600)}
    assert scan(tmp_path, "import m0\nimport torch", **chain).obstacle == "m99.py, after 100 other files"


def test_imports_before_statements_are_found(tmp_path: Path) -> None:
    found = scan(
        tmp_path,
        """
        '''A program.'''
        from __future__ import annotations
        import argparse, os
        import warnings
        print("hello")
        warnings.filterwarnings("ignore")
        parser = argparse.ArgumentParser()
        parser.add_argument("--epochs", type=int, default=os.environ.get("EPOCHS", "3").strip())
        ARGS = parser.parse_args()
        if ARGS.trace: import coverage
        import pytest, elsewhere
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
        setup()
        import torch.nn.functional as F
        import hypothesis
        """,
    )
    assert found.modules == (
        ("pytest", ""), ("numpy", ""), ("torch.utils.data", "DataLoader"),
        ("torch.utils.data", "Dataset"), ("edl.collective", "State"),
    )  # fmt: skip
    assert found.framework
    assert (found.obstacle, found.missed) == ("train.py, line 27", ("torch", "hypothesis"))


def test_another_edl_is_left_to_workers(tmp_path: Path) -> None:
    found = scan(tmp_path, "import torch\nfrom edl.collective import State\n", edl__collective="State = 1")
    assert found.modules == (("torch", ""),), "the program has a package of that name of its own"


@pytest.mark.parametrize(
    "effect",
    [
        'os.environ["OMP_NUM_THREADS"] = "1"',
        'print(os.environ.update(A="1"))',
        "logging.basicConfig()",
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
    assert (found.obstacle, found.framework, found.missed) == ("train.py, line 3", False, ("torch",))
    assert found.modules == (("numpy", ""),), "what stands before the statement is found all the same"


def test_obstacles_in_own_modules_are_found(tmp_path: Path) -> None:
    quiet = "X = 1\nif __name__ == '__main__':\n    test()"
    own = {"config": "import os\nos.chdir('..')\n", "lib__quiet": quiet, "lib____init__": ""}
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


def test_modules_that_a_fork_would_break(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload_module, "find_fork_hazard", str)  # the tests' own process has threads of OpenMP
    files = {
        "e_fine": "import os\nHOME = os.environ.get('HOME'); COPY = dict(os.environ); os.environ['E_SET'] = '1'",
        "e_thread": "import threading, time\nstop = threading.Event()\nthreading.Thread(target=stop.wait).start()",
        "e_socket": "import socket\nopened = socket.socket()",
        "e_rank": "import os\nRANK = os.getenv('LOCAL_RANK', '0')",
        "e_rank_needed": "import os\nRANK = os.environ['RANK']",
        "e_broken": "raise ValueError('odd')",
        "e_unfit": "raise SystemError",
    }
    for name, text in files.items():
        (modules / f"{name}.py").write_text(text)
    try:
        done = preload_modules([(name, "") for name in files], without=("e_unfit",))
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
