"""Does the accuracy of a small ResNet on CIFAR-10 depend on which nodes were present during training?

*Static*: one node throughout. *Elastic*: one to four nodes that join, leave or are killed, with `ElasticTrainer`.
*Ignoring*: the same nodes, but the script ignores the world size, which shows that the benchmark would notice a
difference. Figures are accuracies divided by that of *Static*; `..._off` is the mean difference, in standard errors.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import _launchers as launchers
from benchmarks._cifar import find_pictures, load_pictures
from benchmarks._elastic_job import Job
from benchmarks._harness import Goal, Options, Spread, main, note, take_turns
from benchmarks._resnet import accuracy

GOALS = [Goal("elastic_off", 2.0, "at most"), Goal("ignoring_off", 3.0)]
_MOST_NODES = 4
_RUN_TIMEOUT_S = 1800.0
_POLL_S = 0.05
_RATE = 0.005


@dataclass(frozen=True)
class Size:
    """The size of a training run: training and test images, epochs, batch size of a process, changes of the world."""

    train: int
    test: int
    epochs: int
    batch: int
    changes: int


_FULL = Size(train=4000, test=4000, epochs=6, batch=32, changes=6)
_QUICK = Size(train=500, test=500, epochs=2, batch=32, changes=2)


@dataclass(frozen=True)
class Stay:
    """A world of `world` nodes until `until` samples are trained. If `killed`, nodes that leave then are killed."""

    world: int
    until: int
    killed: bool


def trace(seed: int, size: Size) -> list[Stay]:
    """Return the worlds, and the part of the training that each of them does."""
    total = size.train * size.epochs
    chance = random.Random(seed)
    ends = [round(total * (place + chance.uniform(0.6, 1.0)) / size.changes) for place in range(size.changes)]
    worlds = [chance.choice([2, 3, 4])]
    while len(worlds) < size.changes:
        worlds.append(chance.choice([world for world in (1, 2, 3, 4) if world != worlds[-1]]))
    return [
        Stay(world, total if last else end, killed=not last and place % 3 == 1)
        for place, (world, end) in enumerate(zip(worlds, ends, strict=True))
        for last in [place == size.changes - 1]
    ]


def train(folder: Path, stays: list[Stay], seed: int, size: Size, rate: float, *, ignoring: bool = False) -> float:
    """Train through all stays, and return the accuracy on the test images.

    Raises:
        RuntimeError: The training did not finish in time.
    """
    samples = size.train * size.epochs
    arguments = ["--folder", str(folder), "--seed", str(seed), "--batch", str(size.batch)]
    arguments += ["--samples", str(samples), "--rate", str(rate), *(["--ignoring"] if ignoring else [])]
    (folder / "state.pt").unlink(missing_ok=True)
    deadline = time.monotonic() + _RUN_TIMEOUT_S
    with launchers.edl_script(folder, _MOST_NODES, "_resnet.py", arguments) as job:
        killed = False
        for stay in stays:
            _change(job, stay.world, killed)
            killed = stay.killed
            while _trained(job, stay.world) < stay.until and not (folder / "state.pt").exists():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{_trained(job)} of {samples} samples within {_RUN_TIMEOUT_S:g} s")
                time.sleep(_POLL_S)
        while not (folder / "state.pt").exists():
            if time.monotonic() > deadline:
                raise RuntimeError("the last world did not keep its model")
            time.sleep(_POLL_S)
    return accuracy(folder)


def _change(job: Job, world: int, kill: bool) -> None:
    """Start or end nodes until there are `world` of them."""
    for _ in range(world - len(job.nodes)):
        job.start(job.next_number)
    for number in sorted(job.nodes)[world:]:
        if kill:
            job.kill_node(number)
        else:
            job.ask_to_leave(number)


def _trained(job: Job, world: int | None = None) -> int:
    """Return the samples trained so far, or 0 if the newest step is not from a world of size `world` (default: any)."""
    job.step_logs.read()
    newest = max((steps[-1] for steps in job.step_logs.steps.values() if steps), key=lambda step: step.at, default=None)
    return newest.step if newest is not None and world in (None, newest.world) else 0


def measure(options: Options, data: Path | None = None, rate: float = _RATE) -> dict[str, list[float]]:
    """Return accuracies divided by those of the static twins, and the mean differences from them."""
    size = _QUICK if options.quick else _FULL
    pictures = find_pictures(data)
    with tempfile.TemporaryDirectory() as name:
        for part, loaded in zip(("train", "test"), load_pictures(pictures, size.train, size.test), strict=True):
            np.savez(Path(name) / f"{part}.npz", images=loaded.images, labels=loaded.labels)
        alone = [Stay(1, size.train * size.epochs, killed=False)]
        seeds = {side: iter(range(options.repeats)) for side in ("static", "elastic", "ignoring")}

        def run(side: str) -> float:
            seed = next(seeds[side])
            stays = alone if side == "static" else trace(seed, size)
            folder = Path(name) / f"{side}-{seed}"
            folder.mkdir()
            for part in ("train.npz", "test.npz"):
                (folder / part).symlink_to(Path(name) / part)
            found = train(folder, stays, seed, size, rate, ignoring=side == "ignoring")
            print(f"seed {seed}, {side}: {100 * found:.1f} %", file=sys.stderr, flush=True)
            return found

        found = take_turns({side: partial(run, side) for side in seeds}, options.repeats)
    note(
        f"Trained on {size.train} images for {size.epochs} epochs with a batch of {size.batch} and a rate of {rate:g}."
    )
    for side, values in found.items():
        note(f"Accuracy in %, {side}: {Spread.of([100 * value for value in values])}.")
    return compared(found, size.test)


def compared(found: Mapping[str, list[float]], tested: int) -> dict[str, list[float]]:
    """Return the table's figures: accuracies divided by the static twin's, and mean differences in standard errors."""
    static = found["static"]
    mean = statistics.mean(static)
    of_test_set = (2 * mean * (1 - mean) / tested) ** 0.5  # of the difference of two accuracies
    figures = {}
    for side in ("elastic", "ignoring"):
        differences = [value - twin for value, twin in zip(found[side], static, strict=True)]
        of_seeds = statistics.stdev(differences) if len(differences) > 1 else 0.0
        error = max(of_seeds, of_test_set) / len(differences) ** 0.5
        figures[side] = [value / twin for value, twin in zip(found[side], static, strict=True)]
        figures[f"{side}_off"] = [abs(statistics.mean(differences)) / error]
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--data", type=Path, help="a folder or .tar.gz with train/CLASS/*.jpg and test/CLASS/*.jpg")
    parser.add_argument("--rate", type=float, default=_RATE, help="learning rate (default %(default)s)")
    given = parser.parse_known_args()[0]
    main("accuracy_parity", partial(measure, data=given.data, rate=given.rate), GOALS, __doc__, own=[parser])
