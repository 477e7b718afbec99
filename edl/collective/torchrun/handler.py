"""The entry point `edl` in `torchrun.handlers`, which says what to use instead of `torchrun --rdzv-backend=edl`.

This module stays because torch loads all entry points whenever it starts, and a checkout that was installed with
`pip install -e` keeps the entry points of that time.
"""

from __future__ import annotations

from typing import Any, NoReturn

from edl.collective.removed import describe_removal
from edl.errors import SettingsError


def handler_creator() -> Any:
    """Return the function that torch calls when the backend is requested. Only calling that function may fail."""

    def refuse(params: Any) -> NoReturn:
        raise SettingsError(describe_removal("--rdzv-backend=edl"))

    return refuse
