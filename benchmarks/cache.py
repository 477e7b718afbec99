"""How fast the soft-label cache writes and reads labels, compared with its previous format.

One process, or four at once, write 64 MB of class or token labels and read them back in random order, with a cold and
a warm page cache. The ratios are geometric means.
"""

from __future__ import annotations

import functools
import math
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from benchmarks._cache_side import KINDS, forget
from benchmarks._child import Child
from benchmarks._harness import Goal, Options, Spread, divide, main, note, take_turns

GOALS = [Goal("read_vs_before", 0.9), Goal("write_vs_before", 0.7)]
_SIDES = ("now", "before")
_PROCESSES = (1, 4)


def measure(options: Options) -> dict[str, list[float]]:
    """Return the ratios of every round."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place, ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        children = {
            side: [
                stack.enter_context(Child([sys.executable, "-m", "benchmarks._cache_side", side]))
                for _ in range(max(_PROCESSES))
            ]
            for side in _SIDES
        }

        def rate(side: str, processes: int, do: str, folder: Path, kind: str) -> float:
            def ask(part: int) -> float:
                child = children[side][part]
                found = child.ask(do=do, folder=str(folder), kind=kind, part=part, parts=processes)
                return float(found["per_s"])

            return sum(pool.map(ask, range(processes)))

        def run(side: str, processes: int, kind: str) -> dict[str, float]:
            folder = Path(place, side)
            try:
                found = {"write": rate(side, processes, "write", folder, kind)}
                forget(str(folder))
                for how in ("cold", "warm"):
                    found[f"read {how}"] = rate(side, processes, "read", folder, kind)
                return found
            finally:
                for child in children[side]:
                    child.ask(do="close")
                shutil.rmtree(folder, ignore_errors=True)

        rounds = take_turns(
            {
                f"{kind} {processes} {side}": functools.partial(run, side, processes, kind)
                for kind in KINDS
                for processes in _PROCESSES
                for side in _SIDES
            },
            options.repeats,
        )
    return _compare(rounds)


def _compare(rounds: dict[str, list[dict[str, float]]]) -> dict[str, list[float]]:
    ratios: dict[str, list[list[float]]] = {"read": [], "write": []}
    cases: dict[str, float] = {}
    for kind in KINDS:
        for processes in _PROCESSES:
            now, before = (rounds[f"{kind} {processes} {side}"] for side in _SIDES)
            for what in now[0]:
                found = divide(*([speeds[what] for speeds in side] for side in (now, before)))
                ratios[what.partition(" ")[0]].append(found)
                cases[f"{what}, {kind}, {processes} process{'es' * (processes > 1)}"] = Spread.of(found).median
    low, high = min(cases, key=cases.__getitem__), max(cases, key=cases.__getitem__)
    note(f"The lowest ratio is {cases[low]:.3g} ({low}), and the highest is {cases[high]:.3g} ({high}).\n")
    return {
        f"{what}_vs_before": [_mean(values) for values in zip(*found, strict=True)] for what, found in ratios.items()
    }


def _mean(values: tuple[float, ...]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


if __name__ == "__main__":
    main("cache", measure, GOALS, __doc__)
