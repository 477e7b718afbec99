"""The entry point `edl` of `torchrun.handlers`, which says what to use instead of `torchrun --rdzv-backend=edl`.

It is where the rendezvous was: torch loads all entry points whenever it starts, and a checkout that is installed with
`pip install -e` keeps the entry points of the day on which it was installed.
"""

from __future__ import annotations

from typing import Any, NoReturn

from edl.collective.removed import describe_removal
from edl.errors import SettingsError

__all__ = ["handler_creator"]


def handler_creator() -> Any:
    """Return what torch calls where the backend is asked for; only that call may fail."""

    def refuse(params: Any) -> NoReturn:
        raise SettingsError(describe_removal("--rdzv-backend=edl"))

    return refuse
