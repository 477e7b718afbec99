"""Scripts that know nothing of EDL see under `edl run` what they see under torchrun, and end as they do there.

torchrun starts a worker as `python -u SCRIPT`. So most scripts here run once by that command and once in a fork of a
zygote, all at the same time; what the launchers themselves add is compared in one job of each.
"""

from __future__ import annotations

import compileall
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edl.collective.agent.processes.pool import WorkerExit, WorkerProcesses, ZygoteLost
from edl.collective.agent.processes.zygote import ForkRequest, ProgramSpec

pytestmark = pytest.mark.timeout(300)  # some twenty scripts at the same time, which have 100 s
SCRIPTS = Path(__file__).with_name("scripts")
DEADLINE_S = 100.0
Ending = tuple[int, str, str]
"""Exit status, standard output and standard error of a worker."""


@contextmanager
def zygote(warm: ProgramSpec, environ: Mapping[str, str] | None = None) -> Iterator[Callable[..., list[Ending]]]:
    """A function that forks a worker for each of some environments, and returns how they ended."""
    ended: queue.Queue[WorkerExit | ZygoteLost] = queue.Queue()
    workers = WorkerProcesses(warm, ended.put, {**os.environ, **(environ or {})})
    generation = 0

    def run(folder: Path, *environs: Mapping[str, str]) -> list[Ending]:
        nonlocal generation
        generation += 1
        folder = Path(tempfile.mkdtemp(dir=folder))
        outputs = [
            (folder / f"{generation}-{rank}.out", folder / f"{generation}-{rank}.err") for rank in range(len(environs))
        ]
        forks = {
            rank: ForkRequest({**environ, "EDL_STDOUT": str(out), "EDL_STDERR": str(err)})
            for rank, (environ, (out, err)) in enumerate(zip(environs, outputs, strict=True))
        }
        workers.fork_workers(generation, forks)
        statuses: dict[int, int] = {}
        while len(statuses) < len(environs):
            event = ended.get(timeout=DEADLINE_S)
            assert isinstance(event, WorkerExit), event
            statuses[event.local_rank] = event.status
        return [(statuses[rank], out.read_text(), err.read_text()) for rank, (out, err) in enumerate(outputs)]

    try:
        workers.warm_up()
        yield run
    finally:
        workers.close()


def start_python(folder: Path, name: str, line: Sequence[str], environ: Mapping[str, str]) -> Callable[[], Ending]:
    """Start a worker as torchrun does. Returns a function that waits for its end."""
    out, err = folder / f"python-{name}.out", folder / f"python-{name}.err"
    with out.open("w") as output, err.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-u", *line], env={**os.environ, **environ}, stdout=output, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
    return lambda: (process.wait(DEADLINE_S), out.read_text(), err.read_text())


ENDS = [
    "leave_text", "leave_by_number 0", "leave_by_number 300", "raise_in_frames", "raise_with_hook",
    "interrupt_with_hook", "die 9", "die 10", "handle 15", "handle 2",
    "handle 12", "wait_for_threads", "write_raw", "change_folder", "start_processes",
]  # fmt: skip


def test_ends_are_those_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SCRIPTS)
    line = ["ends.py", "--argument", "a b", ""]
    environs = [{"END": end} for end in ENDS]
    theirs = [start_python(tmp_path, str(index), line, environ) for index, environ in enumerate(environs)]
    with zygote(ProgramSpec("script", line[0], tuple(line[1:]), prewarm=False)) as run:
        ours = run(tmp_path, *environs)
        silent = run(tmp_path, {"END": "interrupt"})
    pairs = {end: (mine, wait()) for end, mine, wait in zip(ENDS, ours, theirs, strict=True)}
    different = {end: pair for end, pair in pairs.items() if pair[0] != pair[1]}
    assert not different
    # No traceback of each rank where somebody pressed Ctrl-C.
    assert silent == [(-signal.SIGINT, "atexit after an interrupt\n", "")]


SHOW = """
    import os, sys
    import near
    print(__name__, __file__, __package__, __cached__, type(__loader__).__name__, __spec__ and __spec__.name)
    print(sys.argv, sys.path, near.__file__, sorted(name for name in globals() if name.startswith("__")))
"""


def test_kinds_of_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dots, links, folders, archives, compiled, wrong and absent ones, modules; a path without the script's folder."""
    (tmp_path / "sub").mkdir()
    for folder in (tmp_path, tmp_path / "sub"):
        (folder / "near.py").write_text("")
        for name in ("show.py", "__main__.py"):
            (folder / name).write_text(textwrap.dedent(SHOW))
    (tmp_path / "linked.py").symlink_to("sub/show.py")
    (tmp_path / "wrong.py").write_text("import sys\nprint('never'\n")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.write(tmp_path / "__main__.py", "__main__.py")
        archive.write(tmp_path / "near.py", "near.py")
    compileall.compile_file(tmp_path / "show.py", quiet=1, legacy=True)
    shutil.move(tmp_path / "show.pyc", tmp_path / "sub" / "compiled.pyc")
    (tmp_path / "random.py").write_text("raise SystemExit('a module of this folder hides the standard library')")
    monkeypatch.chdir(tmp_path)
    here, safe = {}, {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(tmp_path / "sub")}
    targets = ["sub/../sub/show.py", "sub", "archive.zip", "sub/compiled.pyc", "wrong.py", "sub/absent.py", "linked.py"]
    cases = [("script", target, here) for target in targets]
    cases += [("script", "sub/show.py", safe), ("module", "sub.show", here), ("module", "sub.absent", here)]
    theirs = [
        start_python(tmp_path, str(index), ["-m", target] if kind == "module" else [target], environ)
        for index, (kind, target, environ) in enumerate(cases)
    ]
    ours = []
    for kind, target, environ in cases:
        with zygote(ProgramSpec(kind, target, prewarm=False), environ) as run:
            ours += run(tmp_path, {})
    pairs = [(case, mine, wait()) for case, mine, wait in zip(cases, ours, theirs, strict=True)]
    assert not [each for each in pairs if each[1] != each[2]]


COUNTING = """
    import collections, os, sys
    COUNTS = collections.Counter()
    sys.addaudithook(lambda event, _: COUNTS.update([os.getpid()]) if event == "import" else None)
"""
COUNTED = """
    import torch
    import os, sitecustomize
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    print(sitecustomize.COUNTS[os.getpid()], torch.get_num_threads())
"""


def test_a_restart_imports_nothing_again(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(COUNTING))
    script = tmp_path / "counted.py"
    script.write_text(textwrap.dedent(COUNTED))
    environ = {"PYTHONPATH": str(tmp_path)}
    theirs = start_python(tmp_path, "counted", [str(script)], environ)
    with zygote(ProgramSpec("script", str(script)), environ) as run:
        first, restarted = (run(tmp_path, {"OMP_NUM_THREADS": number})[0] for number in ("3", "1"))
    assert first[0] == restarted[0] == theirs()[0] == 0, (first, restarted, theirs())
    assert int(theirs()[1].split()[0]) > 1000, theirs()
    assert max(int(first[1].split()[0]), int(restarted[1].split()[0])) < 30, (first, restarted)
    assert (first[1].split()[1], restarted[1].split()[1]) == ("3", "1"), "threads are those of the generation"


DIFFERENT = {
    "environment/EDL_": "what EDL tells its own parts in the worker",
    "environment/THP_MEM_ALLOC_ENABLE": "memory that is touched for the first time comes faster",
    "environment/MASTER_": "of this start: `localhost` or 127.0.0.1, and a free port",
    "environment/TORCHELASTIC_RUN_ID": "of this start",
    "environment/TORCHELASTIC_ERROR_FILE": "of this start",
    "environment/SEEN": "of this test",
    "process/descriptors": "200 is where a hanging worker's stacks are written",
    "signals/masks": "SIGUSR2 writes the stacks, where the script has no handler of its own",
    "random_numbers/own": "by chance",
    "interpreter/edl": "EDL is there",
    "stack": "the frames that the script is called by end with EDL's",
}
OPTIONS = ["--standalone", "--nproc-per-node", "2", "--role", "student"]


def test_workers_see_what_torchrun_shows(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("torchrun", "edl")}
    jobs = []
    for name, folder in folders.items():
        shutil.copytree(SCRIPTS, folder, ignore=shutil.ignore_patterns("__pycache__"))
        module = ["torch.distributed.run"] if name == "torchrun" else ["edl", "run"]
        line = [sys.executable, "-m", *module, *OPTIONS, "observe.py", "a", "--b", "c d"]
        environ = {**os.environ, "SEEN": str(folder)}
        with (folder / "out").open("w") as output:
            job = subprocess.Popen(
                line, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        jobs.append((job, folder))
    for job, folder in jobs:
        assert job.wait(200) == 0, (folder / "out").read_text()
    numbers = []
    for rank in range(2):
        theirs, ours = (
            flat(json.loads((folder / f"{rank}.json").read_text().replace(str(folder), "FOLDER")))
            for folder in folders.values()
        )
        names = [name for name in theirs | ours if theirs.get(name) != ours.get(name)]
        found = {name: (theirs.get(name), ours.get(name)) for name in names if not name.startswith(tuple(DIFFERENT))}
        assert not found, f"rank {rank}: (torchrun, edl run)"
        assert ours["stack"][-6:] == theirs["stack"][-6:], "the script's own frames"
        numbers.append(ours["random_numbers/own"])
    assert all(first != second for first, second in zip(*numbers, strict=True)), "each rank draws its own"


def flat(found: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, whose keys are paths."""
    result: dict[str, Any] = {}
    for name, value in found.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{name}/")
        else:
            result[prefix + name] = value
    return result
