"""`edl run` with other limits than it comes with, so that a test sees in seconds what follows from them.

python impatient.py [LIMIT=NUMBER]... [OPTIONS OF edl run]

Limits: `pause`, seconds for all workers to pause; `takeover`, seconds until others may go on with a job; `fruitless`,
restarts in a row that lead nowhere.
"""

from __future__ import annotations

import functools
import re
import sys

from edl.collective.agent.command_line import cli as run
from edl.collective.agent.health import restart_policy as restarts
from edl.collective.agent.membership.rendezvous import RendezvousSettings

if __name__ == "__main__":
    limits: dict[str, float] = {}
    arguments = sys.argv[1:]
    while limit := re.fullmatch(r"(pause|takeover|fruitless)=([\d.]+)", arguments[0]):
        limits[limit[1]] = float(limit[2])
        del arguments[0]
    rules = {
        f"{name}_s": limits[key]
        for key, name in (("pause", "pause_timeout"), ("takeover", "takeover"))
        if key in limits
    }
    run.RendezvousSettings = functools.partial(RendezvousSettings, **rules)  # type: ignore[assignment,misc]
    restarts._FRUITLESS = int(limits.get("fruitless", restarts._FRUITLESS))  # type: ignore[misc]
    sys.exit(run.main(arguments))
