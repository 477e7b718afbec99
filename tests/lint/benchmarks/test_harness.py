"""The benchmarks' harness: turns, ratios, the one JSON line, and sides that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import __main__ as every
from benchmarks._child import Child
from benchmarks._harness import Goal, Options, Spread, divide, main, note, table, take_turns


def test_sides_take_turns_at_starting() -> None:
    """Sides take turns, and each round starts with another side."""
    order: list[str] = []

    def side(name: str) -> str:
        order.append(name)
        return name

    rounds = take_turns({name: (lambda name=name: side(name)) for name in "abc"}, 3)  # type: ignore[misc]
    assert "".join(order) == "abc" + "bca" + "cab"
    assert rounds == {"a": ["a"] * 3, "b": ["b"] * 3, "c": ["c"] * 3}


def test_ratios_are_taken_within_a_round() -> None:
    assert divide([10.0, 40.0], [10.0, 20.0]) == [1.0, 2.0]
    with pytest.raises(ValueError, match="argument 2"):
        divide([1.0], [1.0, 2.0])


def test_json_is_one_line_of_the_agreed_form(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    seen: list[Options] = []

    def measure(options: Options) -> dict[str, Sequence[float]]:
        seen.append(options)
        note("by the way")
        return {"vs_peer": [3.0, 1.0, 2.0]}

    options = ["--json", "--repeats", "3", "--seconds", "0.25", "--notes", str(tmp_path / "n")]
    main("example", measure, [], None, options)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"benchmark": "example", "ratios": {"vs_peer": {"median": 2.0, "min": 1.0, "max": 3.0}}}
    assert (tmp_path / "n").read_text() == "by the way"
    assert seen == [Options(repeats=3, seconds=0.25, quick=False)]


def test_meaningless_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main("example", lambda options: {}, [], None, ["--repeats", "0"])
    assert "must be 1 or more" in capsys.readouterr().err


def test_table_says_which_goals_are_met() -> None:
    """The table says which goals are met, missed, and not measured."""
    goals = [Goal("fast", 0.9), Goal("slow", 0.9), Goal("time_s", 1.0, "at most"), Goal("absent", 5.0)]
    spreads = {"fast": Spread.of([0.95]), "slow": Spread.of([0.5]), "time_s": Spread.of([0.2, 3, 0.1])}
    rows = {line.split("|")[1].strip(): line for line in table(spreads, goals).splitlines()[2:]}
    assert rows["fast"].endswith("| at least 0.9 | met |")
    assert rows["slow"].endswith("| **missed** |")
    assert "| 0.2 | 0.1 | 3 | at most 1 | met |" in rows["time_s"]
    assert rows["absent"].endswith("| not measured |")


def test_page_shows_all_figures() -> None:
    """The page shows every figure and nothing of the machine but its kind."""
    names = ("degradation", "kill")
    sections = {}
    for name in names:
        outcome = every.Outcome({"key_of_" + name: Spread(1.0, 0.5, 2.0)}, f"note of {name}")
        sections[name] = every.section(name, outcome, import_module(f"benchmarks.{name}"), 0.3)
    page = every.page("", sections)
    for name in names:
        assert f"## {name}" in page
        assert f"| key_of_{name} | 1 | 0.5 | 2 |" in page
        assert f"note of {name}" in page
    assert f"{os.cpu_count()} cores" in page
    assert os.uname().nodename not in page
    assert str(Path.home()) not in page


def child(tmp_path: Path, handler: str) -> Child:
    """A child that answers with what the expression `handler` of `request` gives."""
    script = tmp_path / "child.py"
    script.write_text(
        f"import os, sys, time\nfrom benchmarks._child import answer\nanswer(lambda request: {handler})\n"
    )
    return Child([sys.executable, str(script)])


def test_childs_prints_do_not_mix_in(tmp_path: Path) -> None:
    """A child answers, and what it prints does not mix in."""
    with child(tmp_path, "print('more noise') or {'twice': 2 * request['number']}") as one:
        assert one.ask(number=4) == {"twice": 8}
        assert one.ask(number=5) == {"twice": 10}


def test_dead_child_is_an_error(tmp_path: Path) -> None:
    """A child that dies is an error with its last words."""
    with child(tmp_path, "sys.exit('my last words')") as one, pytest.raises(RuntimeError, match="my last words"):
        one.ask()


def test_hanging_child_is_an_error_in_time(tmp_path: Path) -> None:
    """A child that hangs is an error after the deadline."""
    begin = time.monotonic()
    with child(tmp_path, "time.sleep(60)") as one:
        with pytest.raises(RuntimeError, match="no answer within"):
            one.ask(timeout_s=0.2)
        pid = one.pid
        one.kill()
    assert time.monotonic() - begin < 30
    assert not Path(f"/proc/{pid}").exists()


def _runs(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


BENCHMARK = """\
import pathlib, signal, subprocess, sys, time
begun = pathlib.Path(__file__).with_name("begun")
left = subprocess.Popen(["sleep", "600"])
try:
    begun.with_suffix(".new").write_text(str(left.pid))
    begun.with_suffix(".new").rename(begun)
    time.sleep(600)
except KeyboardInterrupt:
    print("x" * 200_000, flush=True)  # more than a pipe holds
    time.sleep(0.5)  # a second SIGINT would end the clean-up here
    begun.with_name("cleaned up").touch()
"""


def test_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    """A benchmark is interrupted once and nothing of it is left."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/long.py").write_text(BENCHMARK)
    code = (
        f"from benchmarks import __main__ as every; every.ROOT = every.Path({str(tmp_path)!r}); every.run('long', [])"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", code], cwd=every.ROOT, start_new_session=True, stderr=subprocess.DEVNULL
    )
    begun = tmp_path / "benchmarks/begun"
    deadline = time.monotonic() + 60
    try:
        while not begun.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(runner.pid, signal.SIGINT)  # as a terminal does
        assert runner.wait(30) != 0
    finally:
        runner.kill()
        runner.wait()
    assert begun.with_name("cleaned up").exists()
    deadline = time.monotonic() + 10
    while _runs(int(begun.read_text())):
        assert time.monotonic() < deadline, "a process that it started is left"
        time.sleep(0.02)


@pytest.mark.parametrize("name", every.NAMES)
def test_benchmarks_have_goals_and_words(name: str) -> None:
    module = import_module(f"benchmarks.{name}")
    assert module.__doc__
    assert isinstance(module.GOALS, list)
