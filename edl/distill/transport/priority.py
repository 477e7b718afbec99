"""With which priority a server that others use as well is asked, and how much of it a student then takes.

Triton's extension "schedule_policy" has a request parameter `priority`: 1 is the highest, larger numbers are lower, and
0, or a number beyond the model's `priority_levels`, is the model's default
(https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/protocol/extension_schedule_policy.html).
A server that is executing goes on with it, so that even a request of the highest priority waits for what of ours is
being executed: hence the limits beside it. Decisions only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from edl.errors import SettingsError

__all__ = ["Priority", "RequestPriority", "check_priority", "choose_priority", "parse_priority"]

Priority = Literal["auto", "lowest", "default"] | int

_WORDS: Final = ("auto", "lowest", "default")
_MOST_LEVELS: Final = 2**32  # Triton keeps levels in 32 bits; a larger number is no configuration
_SHARE: Final = 16
"""Rows of a borrowing request, as a share of the model's largest batch. Measured with a model whose time grows with its
rows: with an eighth the p99 of the server's own clients was 1.3 times that without us, with a sixteenth 1.1 times."""


@dataclass(frozen=True)
class RequestPriority:
    """With which priority a model is asked, and how much of it is taken.

    Attributes:
        level: the parameter of requests; 0 for none.
        max_rows: most rows of a request, 0 for no limit of this kind.
        max_in_flight: most requests in flight, 0 for no limit of this kind.
        warning: what a person should know, empty if there is nothing.
    """

    level: int = 0
    max_rows: int = 0
    max_in_flight: int = 0
    warning: str = ""


def check_priority(priority: object) -> None:
    """Check that a value is a priority.

    Raises:
        SettingsError: it is none.
    """
    number = isinstance(priority, int) and not isinstance(priority, bool) and 1 <= priority < _MOST_LEVELS
    if not number and not (isinstance(priority, str) and priority in _WORDS):
        raise SettingsError(f"priority={priority!r}: must be 'lowest', 'default', 'auto', or a level from 1 on")


def parse_priority(text: str) -> Priority:
    """Return a priority from text, such as an option's or that of a registration.

    Raises:
        SettingsError: it is none.
    """
    value: object = int(text) if text.isascii() and text.isdigit() and len(text) < 11 else text
    check_priority(value)
    return value  # type: ignore[return-value]


def choose_priority(
    wanted: Priority, *, supported: bool, levels: int, max_batch: int, instances: int
) -> RequestPriority:
    """Return how a model is asked.

    Args:
        wanted: "auto" for the lowest level where the model has levels, and nothing else; "lowest" to borrow the server
            from its own clients, with few rows and few requests at a time; "default" to be a client like others; or a
            level.
        supported: whether the server announces "schedule_policy".
        levels: `dynamic_batching.priority_levels` of the model's configuration, 0 if unknown.
        max_batch: the most rows that the model takes at once, 0 if unknown.
        instances: of the model, 0 if unknown.
    """
    levels = min(levels, _MOST_LEVELS - 1) if supported and levels > 1 else 0
    if wanted == "default":
        return RequestPriority()
    if wanted == "auto":
        return RequestPriority(levels)
    if isinstance(wanted, int):
        if not levels:
            return RequestPriority(warning=f"it has no priority levels: priority={wanted} has no effect")
        beyond = f"it has {levels} priority levels, and priority={wanted} is asked for: {levels} is used"
        return RequestPriority(min(wanted, levels), warning=beyond if wanted > levels else "")
    warning = "" if levels else "it has no priority levels: its own clients wait behind requests of ours that are there"
    # An instance is left to the server's own clients where there are several.
    rows = max(1, max_batch // _SHARE) if max_batch else 0
    return RequestPriority(levels, rows, max(1, instances - 1), warning)
