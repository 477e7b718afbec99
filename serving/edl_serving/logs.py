"""Log lines of the commands: for people, on stderr."""

from __future__ import annotations

import logging
import sys

__all__ = ["log_to_stderr"]


def log_to_stderr(command: str, *, verbose: bool = False) -> None:
    """Let EDL's loggers write to stderr, and other libraries' from warnings on. For commands only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {command}: %(levelname)s%(message)s", "%H:%M:%S"))
    handler.addFilter(_Quiet())
    root = logging.getLogger()
    root.addHandler(handler)
    for name in ("edl", "edl_serving"):
        logging.getLogger(name).setLevel(logging.DEBUG if verbose else logging.INFO)


class _Quiet(logging.Filter):
    """Names the level only where it matters."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.levelname = "" if record.levelno in (logging.INFO, logging.DEBUG) else f"{record.levelname.lower()}: "
        return True
