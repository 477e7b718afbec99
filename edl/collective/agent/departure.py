"""Why a node leaves a job that goes on without it, though no signal asked it to."""

from __future__ import annotations

from dataclasses import dataclass

from edl.collective.agent.exit_codes import ExitCode
from edl.collective.agent.membership.excluded_hosts import REMEDY

__all__ = ["Departure"]


@dataclass(frozen=True)
class Departure:
    """Why a node leaves, and what to do about it.

    Attributes:
        exit_code: of its agent.
        reason: in a few words, for the record of its end.
        restart: why the others begin a new generation, in a line.
        remedy: what the node's user should do.
    """

    exit_code: ExitCode
    reason: str
    restart: str
    remedy: str

    @classmethod
    def for_faulty_gpu(cls, node: str, job: str) -> Departure:
        """Return the departure of a node whose GPU failed."""
        remedy = f"this host is out of job {job}: {REMEDY}"
        return cls(ExitCode.FAULTY_NODE, "its GPU failed", f"a GPU of {node} failed", remedy)

    @classmethod
    def for_memory(cls, node: str) -> Departure:
        """Return the departure of a node that had too little memory for its workers."""
        reason, restart = "too little memory", f"{node} left: it had too little memory"
        return cls(ExitCode.OUT_OF_MEMORY, reason, restart, "start this node again with more memory")
