"""Samples per second of examples/ctr with 1, 2 and 3 workers, divided by those of one plain process.

The plain process trains the same model in the same batches with `nn.Embedding(sparse=True)`, without EDL: its table is
not sharded, its data are in memory, and it saves nothing. The job's workers get shards from a master, exchange rows and
gradients over gloo, and save their state in memory. All processes compute with one thread. The benchmark never uses
more workers than cores.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks._child import ROOT, Child
from benchmarks._harness import Goal, Options, divide, main, take_turns

GOALS = [Goal("one_worker", 0.8), Goal("two_workers", 1.4)]
_EXAMPLE = ROOT / "examples/ctr"
_BATCH = 4096
_SHARD = 32_768
_WORDS = {1: "one_worker", 2: "two_workers", 3: "three_workers"}


def measure(options: Options) -> dict[str, list[float]]:
    """Return the ratios of every round."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environ = {**os.environ, "EDL_DISCOVERY": f"sqlite:///{folder}/store", "OMP_NUM_THREADS": "1"}
        environ["PYTHONPATH"] = os.pathsep.join([str(_EXAMPLE), str(ROOT), os.environ.get("PYTHONPATH", "")])
        shards = 3 if options.quick else 12
        prepare = [sys.executable, str(_EXAMPLE / "prepare.py"), str(shards * _SHARD)]
        subprocess.run(prepare, cwd=folder, env=environ, check=True, stdout=sys.stderr, timeout=600)
        sides = {"plain": functools.partial(_plain, folder, environ)}
        for count in range(1, min(3, os.cpu_count() or 1) + 1):
            sides[_WORDS[count]] = functools.partial(_workers, count, folder, environ)
        lead = [sys.executable, "-m", "edl", "master", "clicks", "--stay", "--data", f"parquet:{folder}/train.parquet"]
        master = subprocess.Popen([*lead, "--shard-size", str(_SHARD)], env=environ, stderr=subprocess.DEVNULL)
        try:
            rounds = take_turns(sides, options.repeats)
        finally:
            master.terminate()
            master.wait(60)
    return {side: divide(rates, rounds["plain"]) for side, rates in rounds.items() if side != "plain"}


def _workers(count: int, folder: Path, environ: Mapping[str, str]) -> float:
    """Return the median of a job's rows per second over its shards."""
    job = f"bench-{secrets.token_hex(4)}"
    run = [sys.executable, "-m", "edl", "run", "--rdzv-id", job, "--nproc-per-node", str(count)]
    command = [*run, str(_EXAMPLE / "train.py"), "--batch", str(_BATCH)]
    done = subprocess.run(command, cwd=folder, env=environ, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    return _median([float(rate.replace(",", "")) for rate in re.findall(r"([\d,]+) rows/s", done.stdout)])


def _plain(folder: Path, environ: Mapping[str, str]) -> float:
    """Return the median rows per second of a process without EDL, over groups of as many rows as a shard."""
    with Child([sys.executable, "-m", "benchmarks._ctr_plain"], environ) as child:
        return _median(child.ask(timeout_s=600, data=str(folder / "train.parquet"), batch=_BATCH, rows=_SHARD)["rates"])


def _median(rates: list[float]) -> float:
    return statistics.median(rates[1:])  # the first shard warms up


if __name__ == "__main__":
    main("ctr", measure, GOALS, __doc__)
