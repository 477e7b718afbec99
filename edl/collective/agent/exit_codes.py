"""How `edl run` ends."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["ExitCode"]


class ExitCode(IntEnum):
    """Exit codes; a node that left on a signal ends with 128 and the signal's number, as 143 for SIGTERM."""

    DONE = 0
    FAILED = 1
    """The script raised, or ended with another code than 0."""
    NOT_STORED = 74
    """The script has ended, but the last state of this node's workers is not in storage (EX_IOERR of sysexits.h)."""
    TRY_AGAIN = 75
    """Too few nodes came within the deadline (EX_TEMPFAIL of sysexits.h): try again later. `edl.cli` ends so as well
    where the store does not answer when a node comes."""
    FAULTY_NODE = 69
    """A GPU of this node failed, or the node did not pass the check before joining (EX_UNAVAILABLE): run elsewhere."""
    OUT_OF_MEMORY = 137
    """The kernel killed a worker for want of memory, and the node left for that (`--leave-on-oom`). It is the code of a
    process that SIGKILL ended, so that whatever starts nodes again treats it alike."""
