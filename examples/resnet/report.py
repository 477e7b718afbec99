"""Makes the table and the picture in README.md from the runs' files, or from runs.json, which combines these files."""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NAMES = {
    "hard": "hard labels",
    "distilled": "distilled",
    "killed": "distilled, two nodes; teachers and a node killed",
}
SPEEDS = {"alone": "labels alone", "remote": "distilled, teachers on the other cores"}
COLORS = {"hard": "#888888", "distilled": "#1f77b4", "killed": "#d62728"}
BEGIN, END = "<!-- table by report.py -->\n", "<!-- end of table -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, help="folder of compare.py's files (default: read runs.json)")
    parser.add_argument(
        "--teacher", type=Path, default=Path("teacher.json"), help="file that train_teacher.py wrote; used with --runs"
    )
    parser.add_argument("--folder", type=Path, default=HERE, help="folder with README.md, runs.json and accuracy.png")
    options = parser.parse_args()
    collected = options.folder / "runs.json"
    if options.runs:
        runs = [json.loads(path.read_text()) for path in sorted(options.runs.glob("*.json"))]
        teacher = json.loads(options.teacher.read_text())
        text = ",\n".join(json.dumps(shorten(run)) for run in runs)
        collected.write_text(f'{{"teacher": {json.dumps(teacher)}, "runs": [\n{text}\n]}}\n')
    results = json.loads(collected.read_text())
    readme = options.folder / "README.md"
    between = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    readme.write_text(between.sub(lambda _: BEGIN + table(results) + END, readme.read_text()))
    draw(results["runs"], options.folder / "accuracy.png")


def shorten(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run with times relative to its first line, rounded to meaningful digits."""
    begin = run["lines"][0]["time"]
    for entry in run["lines"] + run["events"]:
        entry["time"] -= begin
        entry |= {key: round(value, 4) for key, value in entry.items() if isinstance(value, float)}
    return run


def table(results: dict[str, Any]) -> str:
    """Return the Markdown table: the mean and standard deviation of each arm over the seeds."""
    by_arm = arms(results["runs"])
    rows = [
        "| student | seeds | accuracy | images sent again | CPU per step |",
        "|" + " --- |" * 5,
    ]
    for arm, runs in by_arm.items():
        accuracy = [100 * run["accuracy"] for run in runs]
        sent_again = f"{statistics.mean(resent(run) for run in runs):,.0f}" if arm != "hard" else ""
        cpu = statistics.median(cpu_of_a_step(run) for run in runs)
        cells = [NAMES[arm], str(len(runs)), f"{spread(accuracy, 1)}%", sent_again, f"{cpu:.0f} ms"]
        rows.append("| " + " | ".join(cells) + " |")
    teacher = results["teacher"]
    rows.append(f"| the teacher, {teacher['parameters']:,} parameters | 1 | {100 * teacher['accuracy']:.1f}% | | |")
    if speeds := arms(results["runs"], SPEEDS):
        rows += ["", "| student on half of the cores | runs | steps per second |", "|" + " --- |" * 3]
        for arm, runs in speeds.items():
            rates = [steps_a_second(run) for run in runs]
            rows.append(f"| {SPEEDS[arm]} | {len(runs)} | {spread(rates, 1)} |")
    return "\n".join(rows) + "\n"


def arms(runs: list[dict[str, Any]], names: dict[str, str] = NAMES) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for run in runs:
        found[run["arm"]].append(run)
    return {arm: found[arm] for arm in names if arm in found}


def spread(values: list[float], digits: int) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def pairs(run: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return pairs of consecutive lines with exactly ten steps between them."""
    lines = run["lines"]
    return [
        (line, after)
        for line, after in pairwise(lines)
        if "epoch" not in after and after["step"] == line["step"] + 10 and after["cpu_s"] > line["cpu_s"]
    ]


def resent(run: dict[str, Any]) -> int:
    """Return the number of images sent again because a request failed. A restarted worker counts from 0."""
    counts = [line.get("resent", 0) for line in run["lines"]]
    return counts[-1] + sum(before for before, after in pairwise(counts) if after < before)


def cpu_of_a_step(run: dict[str, Any]) -> float:
    """Return the CPU milliseconds per step of the first node's process, without the teachers."""
    return 100 * statistics.median(after["cpu_s"] - line["cpu_s"] for line, after in pairs(run))


def steps_a_second(run: dict[str, Any]) -> float:
    return 10 / statistics.median(after["time"] - line["time"] for line, after in pairs(run))


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw the accuracy of all runs by epoch, and below it the live teachers in a killed run, with its events."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9, 6), height_ratios=[3, 1.6], layout="constrained"
    )
    for arm, of_arm in arms(runs).items():
        courses = [
            {line["epoch"]: 100 * line["accuracy"] for line in run["lines"] if "epoch" in line} for run in of_arm
        ]
        for course in courses:
            above.plot(list(course), list(course.values()), color=COLORS[arm], alpha=0.3, linewidth=0.8)
        epochs = sorted(set.intersection(*(set(course) for course in courses)))
        means = [statistics.mean(course[epoch] for course in courses) for epoch in epochs]
        above.plot(epochs, means, color=COLORS[arm], linewidth=2, label=f"{NAMES[arm]} ({len(courses)} runs)")
    above.set_ylabel("test images right, %")
    above.legend(loc="lower right")
    above.set_title("Each run by epoch, and the mean of its kind")
    above.grid(alpha=0.3)
    killed = [run for run in runs if run["arm"] == "killed"]
    if killed:
        lines = killed[0]["lines"]
        last = max(line["epoch"] for line in lines if "epoch" in line)
        at = [line["step"] / line["of"] * last for line in lines]
        for key, color in (("teachers", "#2ca02c"), ("nodes", "#9467bd")):
            below.step(at, [line[key] for line in lines], where="post", color=color, label=key)
        for event in killed[0]["events"]:
            if not event["action"].startswith("start"):
                when = max((x for x, line in zip(at, lines, strict=True) if line["time"] <= event["time"]), default=0)
                below.axvline(when, color="black", linestyle=":", linewidth=1)
                below.annotate(event["action"], (when, 2.9), rotation=20, fontsize=8)
        below.set_ylim(0, 4)
        below.yaxis.set_major_locator(MaxNLocator(integer=True))
        below.legend(loc="lower left", ncols=2)
        below.set_ylabel(f"live (seed {killed[0]['seed']})")
    below.set_xlabel("epoch")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
