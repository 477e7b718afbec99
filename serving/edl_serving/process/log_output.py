"""Log lines of the commands on standard error: text for people, or JSON for log collectors."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone

__all__ = ["JsonFormatter", "log_to_stderr"]


def log_to_stderr(command: str, *, verbose: bool = False, log_format: str = "text") -> None:
    """Write EDL's log lines to standard error, and other libraries' from warnings on. For commands only.

    Args:
        command: its name, which begins the lines.
        verbose: write EDL's debug lines, too.
        log_format: "text" or "json".
    """
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(command))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {command}: %(levelname)s%(message)s", "%H:%M:%S"))
        handler.addFilter(_Quiet())
    root = logging.getLogger()
    root.addHandler(handler)
    for name in ("edl", "edl_serving"):
        logging.getLogger(name).setLevel(logging.DEBUG if verbose else logging.INFO)


class JsonFormatter(logging.Formatter):
    """Formats a line as a JSON object: time, level, logger, command, message and, of an exception, its stack.

    Args:
        command: its name.
    """

    def __init__(self, command: str) -> None:
        super().__init__()
        self._command = command

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "command": self._command,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _Quiet(logging.Filter):
    """Names the level only where it matters."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.levelname = "" if record.levelno in (logging.INFO, logging.DEBUG) else f"{record.levelname.lower()}: "
        return True
