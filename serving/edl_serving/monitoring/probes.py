"""What `/livez` and `/readyz` answer: checks by name, as Kubernetes' own servers have them.

https://kubernetes.io/docs/reference/using-api/health-checks/
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

__all__ = ["HealthProbes", "ProbePath"]

_log = logging.getLogger(__name__)

ProbePath = Literal["/livez", "/readyz"]


class HealthProbes:
    """Checks that a process is alive, and that it is ready.

    Whether all of a path's checks pass is its status; the text lists all of them, for a person. A path without checks
    passes.
    """

    def __init__(self) -> None:
        self._checks: dict[str, dict[str, Callable[[], str]]] = {"/livez": {}, "/readyz": {}}

    def add_check(self, path: ProbePath, name: str, check: Callable[[], str]) -> None:
        """Add a check, or replace the one of that name.

        Args:
            path: whose.
            name: of the check, in a word.
            check: returns why it fails, empty if it passes; called in another thread for every request.
        """
        self._checks[path] = {**self._checks[path], name: check}

    def answer(self, path: str) -> tuple[bool, str] | None:
        """Run a path's checks.

        Args:
            path: of the request.

        Returns:
            Whether all passed, and a line for each; None for a path that is none of these.
        """
        checks = self._checks.get(path)
        if checks is None:
            return None
        failures = {name: check() for name, check in checks.items()}
        lines = [f"[-]{name} failed: {why}" if why else f"[+]{name} ok" for name, why in failures.items()]
        passed = not any(failures.values())
        return passed, "\n".join([*lines, f"{path[1:]} check {'passed' if passed else 'failed'}", ""])
