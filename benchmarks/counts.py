"""Copies, context switches and instructions per request, compared with those of bare gRPC.

The load is that of `reader`. Each figure is EDL's count, for student and teacher together, divided by gRPC's.
`copies_shm` is how often the input is copied when it is passed through shared memory.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks._child import Child
from benchmarks._counters import copies_environment, has_instructions, under_callgrind
from benchmarks._harness import Goal, Options, divide, main, note, progress, take_turns
from benchmarks._load import DTYPES, KEEP_MEMORY, request_nbytes

GOALS = [
    Goal("copies", 1.25, "at most"),
    Goal("copies_float32", 1.25, "at most"),
    Goal("copies_shm", 1.25, "at most"),
    Goal("copies_shm_float32", 1.25, "at most"),
]
_IN_FLIGHT = 4
_ROLES = ("student", "teacher")
_MODULES = {"bare grpc": "benchmarks._bare_grpc", "edl channel": "benchmarks._edl_reader"}
_SLOW_START_S = 300.0  # under callgrind, on a machine that has other work
_SLOWLY = 4.0  # how much longer sides run under callgrind, for enough requests

Figures = Mapping[str, float]


def measure(options: Options) -> dict[str, list[float]]:
    """Return EDL's counts divided by gRPC's, for every round."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        environment = copies_environment(Path(folder))
        if not environment:
            note("There is no C compiler (`cc`): copies are left out.\n")
        children = {
            side: stack.enter_context(Child([sys.executable, "-m", module], {**KEEP_MEMORY, **environment}))
            for side, module in _MODULES.items()
        }
        rounds = take_turns(_sides(children, options.seconds), options.repeats)
    if not has_instructions():
        _add_instructions(rounds, options)
    return _ratios(rounds)


def _sides(children: Mapping[str, Child], seconds: float) -> dict[str, Callable[[], Figures]]:
    sides: dict[str, Callable[[], Figures]] = {}
    for dtype in DTYPES:
        for side, child, request in (
            ("bare grpc", children["bare grpc"], {"in_flight": _IN_FLIGHT}),
            ("edl channel", children["edl channel"], {"way": "channel"}),
            ("edl shm", children["edl channel"], {"way": "shm"}),
        ):
            asked: dict[str, Any] = {
                "dtype": dtype,
                "seconds": seconds,
                "counted": True,
                "timeout_s": 60 + 20 * seconds,
                **request,
            }
            sides[f"{side} {dtype}"] = functools.partial(child.ask, **asked)
    return sides


def _second(side: Callable[[], Figures]) -> Figures:
    """Run a side twice and return the second figures: the first run warms the connection up and clears leftovers."""
    side()
    return side()


def _add_instructions(rounds: dict[str, list[Figures]], options: Options) -> None:
    """Count only instructions in another, slower run. If that is impossible, instructions are left out."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        children = {}
        for side, module in _MODULES.items():
            found = under_callgrind([sys.executable, "-m", module], Path(folder))
            if found is None:
                note("The processor's counters cannot be read, and there is no valgrind: instructions are left out.\n")
                return
            progress(f"{side} under callgrind")
            children[side] = stack.enter_context(Child(found[0], {**KEEP_MEMORY, **found[1]}, _SLOW_START_S))
        sides = _sides(children, _SLOWLY * options.seconds)
        counted = take_turns({name: functools.partial(_second, side) for name, side in sides.items()}, 1)
    for name, figures in rounds.items():
        slow = {f"{role}_instructions": counted[name][0][f"{role}_instructions"] for role in _ROLES}
        figures[:] = [{**figure, **slow} for figure in figures]


def _ratios(rounds: Mapping[str, Sequence[Figures]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for dtype, nbytes in ((dtype, request_nbytes(dtype)) for dtype in DTYPES):
        ending = "" if dtype == "uint8" else f"_{dtype}"
        ours, bare, shm = (rounds[f"{side} {dtype}"] for side in ("edl channel", "bare grpc", "edl shm"))
        if "student_copied" in ours[0]:
            found[f"copies{ending}"] = divide(_copies(ours, nbytes), _copies(bare, nbytes))
            found[f"copies_shm{ending}"] = _copies(shm, nbytes)
        for name in ("syscalls", "switches", "instructions"):
            if f"student_{name}" in ours[0]:
                found[f"{name}{ending}"] = divide(_both(ours, name), _both(bare, name))
    return found


def _both(figures: Sequence[Figures], name: str) -> list[float]:
    return [sum(figure[f"{role}_{name}"] for role in _ROLES) for figure in figures]


def _copies(figures: Sequence[Figures], nbytes: int) -> list[float]:
    parts = [_both(figures, name) for name in ("copied", "sent", "received")]
    return [sum(nbytes_of) / nbytes for nbytes_of in zip(*parts, strict=True)]


if __name__ == "__main__":
    main("counts", measure, GOALS, __doc__)
