"""What `edl run` leaves in a container's termination message, read for a `TerminationReport`.

The format is `edl.collective.agent.ending`'s, which this package does not import; a test compares the two.
"""

from __future__ import annotations

import json
from typing import Any, Final

from edl.master.scaling.terminations import TerminationReport

__all__ = ["parse_termination_message"]

_MAX_EXIT_CODE: Final = 255  # of a process; what is larger was not written by an agent
_MAX_KILLS: Final = 2**63  # a kernel's counter has 64 bits


def parse_termination_message(text: str) -> TerminationReport:
    """Return what a termination message says.

    A program of the user's may write the same file, and Kubernetes may put the log's end there
    (`FallbackToLogsOnError`): other text is only a message for people, from which nothing follows.

    Args:
        text: `message` of the container's terminated state; empty for none.

    Returns:
        The cause, the exit code, the kills and the message, as far as they are there; the caller adds what the pod's
        status says, whose exit code is the better witness.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return TerminationReport(message=text.strip())
    if not isinstance(values, dict) or not isinstance(values.get("cause"), str):
        return TerminationReport(message=text.strip())
    message = values.get("message")
    return TerminationReport(
        exit_code=_read_count(values, "exit_code", _MAX_EXIT_CODE),
        oom_kills=_read_count(values, "oom_kills", _MAX_KILLS),
        agent_cause=values["cause"],
        message=message if isinstance(message, str) else "",
    )


def _read_count(values: dict[str, Any], name: str, largest: int) -> int | None:
    """Return a whole number from 0 to `largest`, None where there is none."""
    value = values.get(name)
    return value if type(value) is int and 0 <= value <= largest else None
