"""Which run a stored checkpoint is of: a number that all ranks of a run share, and no other run has.

A step and a generation do not tell two runs apart: each counts its generations from its beginning, and without an agent
there is one only. So every run has a number made of the time at which it began and of random bits, which sorts runs.
Under `edl run` the job's agents agree on it in their Store. Elsewhere the ranks do, when they agree on the next save:
each proposes one, and the largest counts. The environment could not tell: torchrun gives the workers of a world that
changed the same run id, restart count, address and port as those before them.
"""

from __future__ import annotations

import secrets
import time

__all__ = ["new_run_id", "run_name"]

_RANDOM_BITS = 31


def new_run_id() -> int:
    """A number that nobody else has, above that of every run that began a second ago or earlier; 63 bits, above 0."""
    return int(time.time()) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS) or 1


def run_name(run: int) -> str:
    """As it stands in names: 16 hexadecimal digits, which sort as the numbers do."""
    return f"{run:016x}"
