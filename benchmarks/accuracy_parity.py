"""A small ResNet on CIFAR-10 images: does its accuracy depend on who was there while it was trained?

Each round has another seed and trains three times over the same number of samples. *Static*: one process from beginning
to end. *Elastic*: under a churn trace, worlds of one to four processes (real ones, gloo) that resume from one another's
state, a third of them killed so that their last steps are lost; the global batch stays, `ElasticTrainer` sees to the
rest. *Ignoring*: the same trace, each process with the batch of the single one and its learning rate, as a script does
that ignores the world size.

`elastic_off` and `ignoring_off` say by how many spreads a round's accuracy lies away from the mean of the static ones.
A spread is the standard deviation over the static seeds, or what the size of the test set alone makes of it if that is
more. Seeds differ by less than two spreads as a rule, and so should the elastic side.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks._cifar import find_pictures, load_pictures
from benchmarks._harness import Goal, Options, Spread, main, note, take_turns
from benchmarks._resnet import Phase, accuracy, train_phase

GOALS = [Goal("elastic_off", 2.0, "at most"), Goal("ignoring_off", 3.0)]
_PHASE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Size:
    """Of one training: images to learn and to test, epochs, the batch of one process, changes of the world."""

    train: int
    test: int
    epochs: int
    batch: int
    changes: int


_FULL = Size(train=4000, test=4000, epochs=6, batch=32, changes=6)
_QUICK = Size(train=500, test=500, epochs=2, batch=32, changes=2)


@dataclass(frozen=True)
class Stay:
    """A world of `world` processes until `until` samples are trained; `killed` if it loses its last steps then."""

    world: int
    until: int
    killed: bool


def trace(seed: int, size: Size) -> list[Stay]:
    """Which worlds train which part; the last one ends in peace with the last sample."""
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


def train(folder: Path, stays: list[Stay], seed: int, size: Size, *, ignoring: bool = False) -> float:
    """Train through all stays. Returns the accuracy on the test images."""
    (folder / "state.pt").unlink(missing_ok=True)
    for number, stay in enumerate(stays):
        phase = Phase(
            folder,
            seed,
            base_batch=size.batch,
            global_batch=size.batch * (stay.world if ignoring else 1),
            world=stay.world,
            until=stay.until,
            total=size.train * size.epochs,
            killed=stay.killed,
        )
        _run(phase, number)
    return accuracy(folder)


def _run(phase: Phase, number: int) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks._resnet", "torch._dynamo"])
    for leftover in phase.folder.glob("store-*"):
        leftover.unlink()
    ranks = [context.Process(target=train_phase, args=(rank, phase)) for rank in range(phase.world)]
    try:
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(_PHASE_TIMEOUT_S)
        codes = [one.exitcode for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    if phase.killed is not any(code == -9 for code in codes) or (not phase.killed and any(codes)):
        raise RuntimeError(f"phase {number} of {phase.world} processes ended with {codes}")


def measure(options: Options, data: Path | None = None) -> dict[str, list[float]]:
    """Accuracies, and how far they are from the static ones, of every round."""
    size = _QUICK if options.quick else _FULL
    pictures = find_pictures(data)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part, one in zip(("train", "test"), load_pictures(pictures, size.train, size.test), strict=True):
            np.savez(folder / f"{part}.npz", images=one.images, labels=one.labels)
        alone = [Stay(1, size.train * size.epochs, killed=False)]
        seeds = {side: iter(range(options.repeats)) for side in ("static", "elastic", "ignoring")}

        def run(side: str) -> float:
            seed = next(seeds[side])
            stays = alone if side == "static" else trace(seed, size)
            found = train(folder, stays, seed, size, ignoring=side == "ignoring")
            print(f"seed {seed}, {side}: {100 * found:.1f} %", file=sys.stderr, flush=True)
            return found

        found = take_turns({side: partial(run, side) for side in seeds}, options.repeats)
    note(f"Trained on {size.train} images for {size.epochs} epochs with a batch of {size.batch}.")
    for side, values in found.items():
        note(f"Accuracy, {side}: {Spread.of([100 * value for value in values])} %.")
    return compared(found, size.test)


def compared(found: Mapping[str, list[float]], tested: int) -> dict[str, list[float]]:
    """The figures of the table: accuracies relative to the mean static one, and distances in spreads."""
    static = statistics.mean(found["static"])
    seeds = statistics.stdev(found["static"]) if len(found["static"]) > 1 else 0.0
    spread = max(seeds, (static * (1 - static) / tested) ** 0.5)
    figures = {side: [value / static for value in found[side]] for side in ("elastic", "ignoring")}
    for side in ("elastic", "ignoring"):
        figures[f"{side}_off"] = [abs(value - static) / spread for value in found[side]]
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--data", type=Path, help="a folder or .tar.gz with train/CLASS/*.jpg and test/CLASS/*.jpg")
    main("accuracy_parity", partial(measure, data=parser.parse_known_args()[0].data), GOALS, __doc__, own=[parser])
