"""Prints the table in README.md, and draws accuracy.png, from the results of run_table.py."""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--results", type=Path, default=Path("results.jsonl"))
parser.add_argument("--picture", default="accuracy.png")
options = parser.parse_args()

NETS = {"bow": "BOW (Paddle)", "cnn": "CNN", "lstm": "LSTM"}
ARMS = {  # taught, more text
    (False, False): "hard labels",
    (False, True): "hard labels, and texts labelled by the student",
    (True, False): "distilled, labelled texts only",
    (True, True): "distilled, with unlabelled texts",
}
results = [json.loads(line) for line in options.results.read_text().splitlines()]


def of(model: str, **arm: bool) -> dict[int, float]:
    """Return the accuracy on the test texts, in per cent, by seed."""
    wanted = {"model": model, **arm}
    return {result["seed"]: 100 * result["test"] for result in results if wanted.items() <= result.items()}


def shown(values: list[float]) -> str:
    return f"{mean(values):.1f} ± {stdev(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


cells = {(net, arm): of(net, taught=taught, more_text=more) for net in NETS for arm, (taught, more) in enumerate(ARMS)}
seeds = set(of("teacher")).intersection(*cells.values())  # seeds with results of all students
if not seeds:
    raise SystemExit("no seed is complete")
cells = {key: {seed: values[seed] for seed in sorted(seeds)} for key, values in cells.items()}
teacher = [of("teacher")[seed] for seed in sorted(seeds)]


def difference(net: str, arm: int, other: int) -> str:
    """Return how much better one arm is than another, seed by seed."""
    values = [cells[net, arm][seed] - cells[net, other][seed] for seed in sorted(seeds)]
    return f"{mean(values):+.1f} ({min(values):+.1f} to {max(values):+.1f})"


print(f"{len(seeds)} seeds. Teacher: {shown(teacher)}.\n")
print("| | " + " | ".join(NETS.values()) + " |")
print("| --- |" + " ---: |" * len(NETS))
for arm, name in enumerate(ARMS.values()):
    print(f"| {name} | " + " | ".join(shown(list(cells[net, arm].values())) for net in NETS) + " |")
print("\n| mean gain (lowest to highest of the seeds) | " + " | ".join(NETS.values()) + " |")
print("| --- |" + " ---: |" * len(NETS))
for name, arm, other in (
    ("from the teacher, with labelled texts only", 2, 0),
    ("from more texts, without a teacher", 1, 0),
    ("from the teacher, with all texts", 3, 1),
    ("from more texts, with a teacher", 3, 2),
    ("from both", 3, 0),
):
    print(f"| {name} | " + " | ".join(difference(net, arm, other) for net in NETS) + " |")

figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
for arm, (name, color) in enumerate(zip(ARMS.values(), ("#b8bec7", "#7d8794", "#8fb8de", "#1f6fb5"), strict=True)):
    places = [place + (arm - 1.5) * 0.2 for place in range(len(NETS))]
    values = [list(cells[net, arm].values()) for net in NETS]
    axes.bar(places, [mean(of_net) for of_net in values], 0.19, color=color, label=name)
    for place, of_net in zip(places, values, strict=True):
        axes.plot([place] * len(of_net), of_net, ".", color="black", markersize=4)
axes.axhline(mean(teacher), color="#c0392b", linestyle="--", linewidth=1, label="teacher")
axes.set_xticks(range(len(NETS)), NETS.values())
axes.set_ylim(50, None)  # the accuracy of guessing
axes.set_ylabel(f"% right on the test texts; dots: {len(seeds)} seeds")
figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
figure.savefig(options.picture, dpi=120)
