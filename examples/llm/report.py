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
    "off-policy": "off-policy",
    "on-policy": "on-policy",
    "killed": "on-policy, both teachers killed",
}
COLORS = {"hard": "#888888", "off-policy": "#1f77b4", "on-policy": "#2ca02c", "killed": "#d62728"}
MEASURES = {
    "perplexity": (2, "perplexity on held-out files"),
    "own_text": (3, "nats a token from the teacher, own text"),
}
BEGIN, END = "<!-- table by report.py -->\n", "<!-- end of table -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, help="folder of compare.py's files (default: read runs.json)")
    parser.add_argument("--teacher", type=Path, default=Path("teacher"), help="folder of the teacher; used with --runs")
    parser.add_argument("--folder", type=Path, default=HERE, help="folder with README.md, runs.json and students.png")
    options = parser.parse_args()
    collected = options.folder / "runs.json"
    if options.runs:
        runs = [json.loads(path.read_text()) for path in sorted(options.runs.glob("*.json"))]
        teacher = json.loads((options.teacher / "facts.json").read_text())
        text = ",\n".join(json.dumps(shorten(run)) for run in runs)
        collected.write_text(f'{{"teacher": {json.dumps(teacher)}, "runs": [\n{text}\n]}}\n')
    results = json.loads(collected.read_text())
    readme = options.folder / "README.md"
    between = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    readme.write_text(between.sub(lambda _: BEGIN + table(results) + END, readme.read_text()))
    draw(results, options.folder / "students.png")


def shorten(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run with times relative to its first line, rounded to meaningful digits."""
    begin = run["lines"][0]["time"]
    for entry in [run, *run["lines"], *run["events"]]:
        if "time" in entry:
            entry["time"] -= begin
        entry |= {key: round(value, 4) for key, value in entry.items() if isinstance(value, float)}
    return run


def table(results: dict[str, Any]) -> str:
    """Return the Markdown tables: each arm's mean and standard deviation, and the differences seed by seed."""
    by_arm, teacher = arms(results["runs"]), results["teacher"]
    columns = ("student", "seeds", "perplexity", "nats from the teacher", "labelled by vLLM", "tokens sent again")
    rows = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    for arm, runs in by_arm.items():
        cells = [NAMES[arm], str(len(runs))]
        cells += [spread([run[measure] for run in runs], digits) for measure, (digits, _) in MEASURES.items()]
        if arm == "hard":
            cells += ["", ""]
        else:
            cells += [
                f"{statistics.mean(map(share_of_vllm, runs)):.0%}",
                f"{statistics.mean(map(sent_again, runs)):,.0f}",
            ]
        rows.append("| " + " | ".join(cells) + " |")
    rows.append(f"| the teacher | 1 | {teacher['perplexity']:.2f} | | | |")
    rows += [
        "",
        "| mean difference (lowest to highest of the seeds) | perplexity | nats from the teacher |",
        "|" + " --- |" * 3,
    ]
    for arm, other in (
        ("off-policy", "hard"),
        ("on-policy", "hard"),
        ("on-policy", "off-policy"),
        ("killed", "on-policy"),
    ):
        differences = [difference(by_arm, arm, other, measure, digits) for measure, (digits, _) in MEASURES.items()]
        if all(differences):
            rows.append(f"| {NAMES[arm]}, against {NAMES[other]} | " + " | ".join(differences) + " |")
    student = next(iter(by_arm.values()))[0]
    kinds = sorted({kind for runs in by_arm.values() for run in runs for kind in run["teachers"].values()})
    rows += [
        "",
        f"The teacher has {teacher['parameters']:,} parameters and learned from {teacher['tokens']:,} tokens in "
        f"{teacher['files']} files; a student has {student['parameters']:,} parameters. The "
        f"{teacher['held_out_files']} held-out files have {teacher['held_out_tokens']:,} tokens "
        f"(Python {teacher['python']}). Teachers were served by {' and '.join(kinds)}.",
        "",
        "![Both measures of every student, and the teachers of a killed run](students.png)",
    ]
    return "\n".join(rows) + "\n"


def arms(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for run in runs:
        found[run["arm"]].append(run)
    return {arm: found[arm] for arm in NAMES if arm in found}


def spread(values: list[float], digits: int) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def difference(by_arm: dict[str, list[dict[str, Any]]], arm: str, other: str, measure: str, digits: int) -> str:
    """Return how much larger a measure is in one arm than in another, over the seeds that both arms have."""
    of_arm, of_other = ({run["seed"]: run[measure] for run in by_arm.get(name, [])} for name in (arm, other))
    values = [of_arm[seed] - of_other[seed] for seed in sorted(of_arm.keys() & of_other.keys())]
    if not values:
        return ""
    return f"{statistics.mean(values):+.{digits}f} ({min(values):+.{digits}f} to {max(values):+.{digits}f})"


def phases(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the last line of each phase. Counters restart when the student begins to write its own text."""
    lines = run["lines"]
    return [now for now, later in pairwise(lines) if later["tokens"] < now["tokens"]] + lines[-1:]


def sent_again(run: dict[str, Any]) -> int:
    """Return the number of tokens sent again because a request failed or was late."""
    return sum(line["resent"] + line["hedged"] for line in phases(run))


def share_of_vllm(run: dict[str, Any]) -> float:
    """Return the share of the tokens that vLLM labelled."""
    answered = [entry for line in phases(run) for entry in line["answered"].items()]
    total = sum(tokens for _, tokens in answered)
    return sum(tokens for endpoint, tokens in answered if run["teachers"].get(endpoint) == "vLLM") / total


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw both measures of all runs, and below them the live teachers in a killed run, with its events."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure = pyplot.figure(figsize=(9, 6.5), layout="constrained")
    axes = figure.subplot_mosaic([["perplexity", "own_text"], ["live", "live"]], height_ratios=[3, 1.5])
    by_arm = arms(results["runs"])
    for measure, (_, title) in MEASURES.items():
        for place, (arm, runs) in enumerate(by_arm.items()):
            values = [run[measure] for run in runs]
            axes[measure].plot([place] * len(values), values, "o", color=COLORS[arm], alpha=0.5)
            axes[measure].plot(place, statistics.mean(values), "_", color=COLORS[arm], markersize=40, markeredgewidth=2)
        axes[measure].set_xticks(range(len(by_arm)), [NAMES[arm].replace(", ", ",\n") for arm in by_arm], fontsize=8)
        axes[measure].set_xlim(-0.6, len(by_arm) - 0.4)
        axes[measure].set_title(title, fontsize=10)
        axes[measure].grid(axis="y", alpha=0.3)
    if killed := by_arm.get("killed"):
        lines, events = killed[0]["lines"], killed[0]["events"]
        steps = [line["step"] for line in lines]
        axes["live"].step(steps, [line["teachers"] for line in lines], where="post", color=COLORS["killed"])
        second = "vLLM" if "vLLM" in killed[0]["teachers"].values() else "a teacher"
        names = (f"{second} is killed", "another teacher is started", "edl serve is killed")
        for name, event, side in zip(names, events, ("right", "left", "left"), strict=True):
            when = max((line["step"] for line in lines if line["time"] <= event["time"]), default=0)
            axes["live"].axvline(when, color="black", linestyle=":", linewidth=1)
            axes["live"].annotate(f" {name} ", (when, 2.6), fontsize=8, horizontalalignment=side)
        axes["live"].set_title(f"teachers live in a killed run (seed {killed[0]['seed']})", fontsize=10)
        axes["live"].set_ylim(0, 3.2)
        axes["live"].yaxis.set_major_locator(MaxNLocator(integer=True))
    axes["live"].set_xlabel("step")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
