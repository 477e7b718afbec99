"""`edl run` with a limit of half a second for all workers to pause, so that a step may be long without taking long.

python impatient.py [OPTIONS OF edl run]
"""

from __future__ import annotations

import functools
import sys

from edl.collective.agent import run
from edl.collective.agent.world import Rules

if __name__ == "__main__":
    run.Rules = functools.partial(Rules, pause_timeout_s=0.5)  # type: ignore[assignment,misc]
    sys.exit(run.main(sys.argv[1:]))
