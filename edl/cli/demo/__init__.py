"""`edl demo`: train students while teachers come and go, on scikit-learn's handwritten digits.

`models` contains the plan (the demo's settings), the images, the teacher and the students. `story` runs the demo:
teachers are ordinary `edl serve` processes, students train from a `DistillReader` while a timeline is recorded, and
every label is checked. Like a user's program, the demo uses only public names; the rest of EDL does not depend on the
demo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from edl.command_line import CommandParser
from edl.end_signals import exit_on_sigterm

__all__ = ["main"]

_DESCRIPTION = """\
Trains a teacher on scikit-learn's handwritten digits, serves it with several `edl serve` processes, and trains much
smaller students on its soft labels. Meanwhile one teacher is killed with SIGKILL, a new one joins, and one is drained
with SIGTERM. For comparison, identical students learn from the images' own labels alone.

At the end you see how well each student did, how many rows each teacher served, and that every sample arrived exactly
once with its own label. A plot shows throughput over time, with the kill, join and drain marked. The demo takes about
two minutes on two cores.

The teachers sleep briefly during each batch so that the small network takes as long as a large one; everything else
is real: processes, sockets, signals, discovery."""

_EXAMPLES = """\
examples:
  edl demo                          everything; results in out/demo
  edl demo --quick                  in a third of the time, with fewer seeds and steps
  edl demo --dashboard              with a web page that shows everything live
  edl demo --out /tmp/d             results in another folder"""


def main(argv: Sequence[str]) -> int:
    """Run `edl demo`."""
    parser = CommandParser("edl demo", _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/demo"), metavar="DIR", help="where results go (default: out/demo)")
    add("--quick", action="store_true", help="fewer seeds and steps, in a third of the time")
    add("--dashboard", action="store_true", help="also show the demo on a web page")
    options = parser.parse_args(argv)

    from edl.cli.demo.models import DemoPlan
    from edl.cli.demo.story import Screen, tell

    plan = DemoPlan(out=options.out, dashboard=options.dashboard)
    if options.quick:
        plan = replace(plan, seeds=2, steps=400, teacher_epochs=15, join_at=plan.kill_at)
    with exit_on_sigterm():  # ends the teachers and cleans up
        tell(plan, Screen())
    return 0
