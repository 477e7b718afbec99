"""Writes the commands' log lines to standard error, as text or JSON. The library itself configures no output."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone


def log_to_stderr(command: str, *, verbose: bool = False, log_format: str = "text") -> None:
    """Write EDL's log lines, and warnings from other libraries, to standard error. For commands only.

    `log_format` is "text" or "json".
    """
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(command))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {command}: %(levelname)s%(message)s", "%H:%M:%S"))
        handler.addFilter(_Quiet())
    logging.getLogger().addHandler(handler)
    for name in ("edl", "edl_serving"):
        logging.getLogger(name).setLevel(logging.DEBUG if verbose else logging.INFO)


@contextmanager
def plain_log_to_stderr(command: str, loggers: Collection[str], log_format: str = "text") -> Iterator[None]:
    """Within the block, write log lines to standard error, as text without time and level. For commands only.

    Log lines of `loggers` are written from level INFO up, other log lines from WARNING up. `log_format` is "text" or
    "json".
    """
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter(f"{command}: %(message)s")
    handler.setFormatter(JsonFormatter(command) if log_format == "json" else plain)
    handler.addFilter(_NamedOrWarning(loggers))
    levels = {name: logging.getLogger(name).level for name in loggers}
    root = logging.getLogger()
    root.addHandler(handler)
    for name in levels:
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object, in which fields passed as `extra=` keep their names."""

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
        fields = {name: value for name, value in vars(record).items() if name not in _RECORD_ATTRIBUTES}
        line = {**line, **fields, **line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


_RECORD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"asctime", "message", "taskName"}
"""Attributes of every record; `logging` refuses these names in `extra=`. Python 3.12 adds `taskName`, which `logging`
allows."""


class _NamedOrWarning(logging.Filter):
    """Passes all records of these loggers and their children, and warnings from other loggers."""

    def __init__(self, loggers: Collection[str]) -> None:
        super().__init__()
        self._prefixes = tuple(f"{name}." for name in loggers)

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or f"{record.name}.".startswith(self._prefixes)


class _Quiet(logging.Filter):
    """Formats records as text, with the level only for warnings and errors."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.levelname = "" if record.levelno in (logging.INFO, logging.DEBUG) else f"{record.levelname.lower()}: "
        return True
