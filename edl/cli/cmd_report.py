"""`edl report`: a picture of a job: what its nodes did when, how far it got, and the goodput."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from edl.cli import _jobs
from edl.cli._changes import printable
from edl.collective.goodput.ledger import TimeCategory
from edl.collective.goodput.report import COLOURS, choose_time_unit, draw_report, main_categories
from edl.collective.goodput.summary import Summary
from edl.discovery import open_store
from edl.errors import SettingsError
from edl.settings import DiscoverySettings

__all__ = ["main"]

# One letter for each state, so that a file or a terminal without colours shows the same.
_LETTERS = {
    TimeCategory.TRAIN: "━",
    TimeCategory.SAVE: "s",
    TimeCategory.LOAD: "l",
    TimeCategory.ROLLBACK: "r",
    TimeCategory.RENDEZVOUS: "m",
    TimeCategory.IDLE: "·",
    TimeCategory.DOWN: "x",
}
_NAME_WIDTH = 20
"""Characters of a node's name: the end of a host's name tells nodes apart, and the rest is for the time line."""
_MAX_ROWS = 20
"""Of nodes, and of events: with both the report fits on a screen or two."""
_WIDTH = 120
"""Characters where the output is no terminal."""

_DESCRIPTION = """\
Draws an elastic job from its ledger, while it runs or after it ended: a row of states for each node, what happened
when, the steps over time, and the goodput: the part of the wall-clock time that went into steps which were finished
once and not lost. In the terminal each column shows what most of its time was used for; the file shows all of it."""

_EXAMPLES = """\
examples:
  edl report myjob                        in the terminal
  edl report myjob --out myjob.png        a picture as well (.png, .svg or .pdf)
  edl report myjob --store consul://10.0.0.7:8500"""


def main(argv: Sequence[str]) -> int:
    """Run `edl report`."""
    parser = _jobs.parser("report", _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("--out", type=Path, metavar="FILE", help="write a picture: .png, .svg or .pdf")
    options = parser.parse_args(argv)
    with open_store(DiscoverySettings.of(options.store).url) as store:
        summary = _jobs.look(store, options.job)
    if not summary.ledger.elapsed_us:
        raise SettingsError(f"job {options.job!r} has no ledger yet: its agents have only begun")
    if options.out is not None:
        draw_report(summary, options.out)
    console = _jobs.console(_WIDTH)
    _print_timeline(summary, console)
    _print_steps(summary, console)
    if options.out is not None:
        console.print(Text(printable(f"The picture is in {options.out}")))
    return 0


def _print_timeline(summary: Summary, console: Console) -> None:
    ledger = summary.ledger
    unit, unit_us = choose_time_unit(ledger.elapsed_us)
    known = f"goodput {ledger.goodput or 0.0:.1%}" if summary.steps_known else "goodput unknown (no steps reported)"
    elapsed = f"{ledger.elapsed_us / unit_us:.3g} {unit}"
    console.print(Text(printable(f"job {summary.job}: {summary.state}, {known} of {elapsed}"), "bold"))
    for state in TimeCategory:
        if amount := ledger.amounts[state]:
            part = (
                f"{_LETTERS[state]} {state.name.lower():<10} {amount / ledger.elapsed_us:7.2%} {amount / 1e6:10.2f} s"
            )
            console.print(Text(part, COLOURS[state]))
    width = max(20, min(console.width, _WIDTH) - _NAME_WIDTH - 1)
    until_us = ledger.began_us + ledger.elapsed_us
    rows = [("the job", ledger.spans, ledger.began_us)]
    nodes = sorted((row.record for row in summary.nodes), key=lambda record: record.began_us)
    rows += [(node.node, node.spans, node.began_us) for node in nodes[-_MAX_ROWS:]]
    for name, spans, began_us in rows:
        line = Text(printable(name)[-_NAME_WIDTH:].rjust(_NAME_WIDTH) + " ")
        for column in main_categories(spans, began_us, ledger.began_us, until_us, width):
            line.append(" " if column is None else _LETTERS[column], None if column is None else COLOURS[column])
        console.print(line)


def _print_steps(summary: Summary, console: Console) -> None:
    """Draw the last step over time, and the job's events below."""
    import plotext

    ledger = summary.ledger
    unit, unit_us = choose_time_unit(ledger.elapsed_us)
    marks = sorted(
        ((row.record.began_us - ledger.began_us + mark.at_us) / unit_us, mark.step)
        for row in summary.nodes
        for mark in row.record.marks
        if mark.step >= 0
    )
    if marks:
        figure = plotext.figure
        figure.clear()
        figure.plot_size(min(console.width, _WIDTH), 14)
        figure.title(f"last step, by {unit} since the job began")
        figure.ruler("x").lim(0, ledger.elapsed_us / unit_us)
        highest = max(1, *(step for _, step in marks))
        ticks = [highest * part // 4 for part in range(5)]
        figure.ruler("y").ticks(ticks, [f"{tick:,}" for tick in ticks])
        curve = figure.signal([at for at, _ in marks], [step for _, step in marks], marker=plotext.marker("hd", "cyan"))
        figure.draw(curve.lines())
        console.print(Text.from_ansi(figure.build().string(colorless=not console.is_terminal)))
    for event in summary.events[-_MAX_ROWS:]:
        at = (event.at_us - ledger.began_us) / unit_us
        console.print(Text(printable(f"{at:10.2f} {unit[0]}  {event.kind:<10}  {event.node}  {event.text}".rstrip())))
