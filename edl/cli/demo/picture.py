"""Throughput over time, as a PNG and in the terminal, with what happened to the teachers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from edl.cli.demo.timeline import Timeline

__all__ = ["draw", "show"]

_COLOURS = ("#4c78a8", "#72b7b2", "#eeca3b", "#b279a2", "#9d755d", "#83bcb6")
_EVENT_COLOURS = {"kill": "#d62728", "join": "#2ca02c", "drain": "#e08214"}
_TERMINAL_COLOURS = {"kill": "red", "join": "green", "drain": "orange"}
_EVENT_WORDS = {"kill": "killed (SIGKILL)", "join": "joins", "drain": "drains (SIGTERM)"}


def draw(timeline: Timeline, path: Path, what: str) -> None:
    """Write the picture to `path`: rows a second by teacher, stacked. `what` begins the title."""
    from matplotlib.figure import Figure

    rates = timeline.rates(0.5)
    figure = Figure(figsize=(10, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.stackplot(
        rates.at_s,
        *rates.served.values(),
        labels=list(rates.served),
        colors=[_COLOURS[index % len(_COLOURS)] for index in range(len(rates.served))],
        alpha=0.85,
    )
    axes.plot(rates.at_s, rates.delivered, color="#222222", linewidth=1.6, label="into the training loop")
    top = 1.32 * max(1.0, float(np.max(sum(rates.served.values(), np.zeros_like(rates.at_s)))))
    for row, event in enumerate(timeline.events):
        colour = _EVENT_COLOURS[event.kind]
        axes.axvline(event.at_s, color=colour, linewidth=1.6, linestyle="--")
        axes.annotate(
            f"{event.teacher} {_EVENT_WORDS[event.kind]}",
            (event.at_s, top),
            xytext=(5, -6 - 15 * row),
            textcoords="offset points",
            verticalalignment="top",
            color=colour,
            fontsize=9,
            fontweight="bold",
            bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.5},  # over other events' lines
        )
    axes.set(xlim=(0, timeline.end_s), ylim=(0, top), xlabel="seconds of the epoch", ylabel="soft labels a second")
    axes.set_title(f"{what}, each labelled once and in order, while teachers come and go", loc="left", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    figure.legend(loc="outside lower center", fontsize=9, frameon=False, ncols=len(rates.served) + 1)
    figure.savefig(path)


def show(timeline: Timeline, console: Console) -> None:
    """Draw into the terminal: rows a second, and a line for every event."""
    import plotext

    rates = timeline.rates(0.5)
    highest = max(1.0, float(rates.delivered.max(initial=0.0)))
    top = 1.5 * highest
    figure = plotext.figure
    figure.clear()
    columns = min(console.width, 100)
    figure.plot_size(columns, 20)
    figure.title("soft labels a second into the training loop, by seconds of the epoch")
    figure.ruler("x").lim(0, timeline.end_s)
    figure.ruler("y").lim(0, top)
    ticks = np.arange(0.0, highest, _round_step(highest / 4))
    figure.ruler("y").ticks(list(ticks), [f"{tick:,.0f}" for tick in ticks])
    curve = figure.signal(list(rates.at_s), list(rates.delivered), marker=plotext.marker("hd", "cyan"))
    figure.draw(curve.lines().fillx())
    for row, event in enumerate(timeline.events):
        colour = _TERMINAL_COLOURS[event.kind]
        figure.line(event.at_s, "vertical", pixel=colour)
        height = (1.44 - 0.12 * row) * highest  # a row for each, since two may happen at nearly the same time
        words = f" {event.kind} {event.teacher}"
        latest_s = timeline.end_s * (1 - len(words) / max(1, columns - 10))  # behind it they would be cut at the edge
        figure.draw(figure.text(max(0.0, min(event.at_s, latest_s)), height, plotext.colorize(words, colour)))
    picture = figure.build().string(colorless=not console.is_terminal)
    console.print(Text.from_ansi(picture))


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ... that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
