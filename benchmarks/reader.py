"""Rows per second through EDL's reader and teacher server, compared with bare gRPC and with PyTriton.

A teacher that computes nothing gets batches of 32 images (3x224x224, uint8 or float32) and returns 1,000 float32
values per image, over loopback TCP or shared memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from benchmarks._child import ROOT, Child
from benchmarks._harness import Goal, Options, Spread, divide, main, note, take_turns
from benchmarks._load import DTYPES, KEEP_MEMORY

GOALS = [
    Goal("vs_bare_grpc", 1.5),
    Goal("vs_pytriton_shm", 6.0),
    Goal("vs_pytriton_grpc", 4.0),
    Goal("vs_bare_grpc_float32", 1.8),
    Goal("vs_pytriton_shm_float32", 6.0),
    Goal("vs_pytriton_grpc_float32", 4.0),
]
_IN_FLIGHT = (1, 2, 4, 8)
_TRITON_PYTHON = ROOT / ".tools/triton/bin/python"
_RATIOS = {
    "vs_bare_grpc": ("edl channel", "bare grpc"),
    "vs_pytriton_shm": ("edl shm", "pytriton shm"),
    "vs_pytriton_grpc": ("edl channel", "pytriton grpc"),
}


def measure(options: Options) -> dict[str, list[float]]:
    """Return the ratios of every round."""
    with ExitStack() as stack:
        sides = _sides(options, stack)
        rounds = take_turns(sides, options.repeats)
    _tell(rounds)
    found = {}
    for dtype in DTYPES:
        for key, (ours, theirs) in _RATIOS.items():
            if f"{theirs} {dtype}" in rounds:
                rates = [[figure["rows_s"] for figure in rounds[f"{side} {dtype}"]] for side in (ours, theirs)]
                found[key if dtype == "uint8" else f"{key}_{dtype}"] = divide(*rates)
    return found


def _sides(options: Options, stack: ExitStack) -> dict[str, Callable[[], dict[str, Any]]]:
    bare = stack.enter_context(Child([sys.executable, "-m", "benchmarks._bare_grpc"], KEEP_MEMORY))
    edl = stack.enter_context(Child([sys.executable, "-m", "benchmarks._edl_reader"]))
    triton = None
    if _TRITON_PYTHON.exists():
        triton = stack.enter_context(Child([str(_TRITON_PYTHON), "-m", "benchmarks._pytriton"], KEEP_MEMORY))
    else:
        note("PyTriton is not installed (`make tools` fetches it): its ratios are left out.\n")
    sides: dict[str, Callable[[], dict[str, Any]]] = {}
    for dtype in DTYPES:
        sides[f"bare grpc {dtype}"] = _best(bare, [{"dtype": dtype}], options)
        for way in ("channel", "shm"):
            sides[f"edl {way} {dtype}"] = _ask(edl, {"dtype": dtype, "way": way}, options.seconds)
        if triton is not None:
            ways = [{"dtype": dtype, "way": way} for way in ("grpc_aio", "grpc_threads")]
            sides[f"pytriton grpc {dtype}"] = _best(triton, ways, options)
            sides[f"pytriton shm {dtype}"] = _best(triton, [{"dtype": dtype, "way": "shm"}], options)
    return sides


def _ask(child: Child, request: dict[str, Any], seconds: float) -> Callable[[], dict[str, Any]]:
    return lambda: child.ask(seconds=seconds, timeout_s=seconds + 60, **request)


def _best(child: Child, requests: list[dict[str, Any]], options: Options) -> Callable[[], dict[str, Any]]:
    """Return a side with the best way and number of requests in flight, chosen by two short trials of each."""
    trial_s = min(1.0, options.seconds)
    candidates = [{**request, "in_flight": number} for request in requests for number in _IN_FLIGHT]
    trials = {", ".join(map(str, candidate.values())): candidate for candidate in candidates}
    rates = take_turns(
        {f"the best of: {name} in flight": _ask(child, candidate, trial_s) for name, candidate in trials.items()},
        1 if options.quick else 2,
    )
    best = max(zip(rates.values(), candidates, strict=True), key=lambda pair: max(run["rows_s"] for run in pair[0]))[1]
    return _ask(child, best, options.seconds)


def _tell(rounds: dict[str, list[dict[str, Any]]]) -> None:
    note("| side | rows/s | CPU µs/row |\n| --- | ---: | ---: |")
    for name, figures in rounds.items():
        rate, cpu = (Spread.of([figure[key] for figure in figures]).median for key in ("rows_s", "cpu_us_row"))
        note(f"| {name} | {rate:,.0f} | {cpu:.0f} |")
    note("")


if __name__ == "__main__":
    main("reader", measure, GOALS, __doc__)
