"""A file that says that a process is ready, for whoever started it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edl.errors import SettingsError

__all__ = ["ReadyFile"]


class ReadyFile:
    """Written whole or not at all; gone before the process is ready and after it is no longer.

    Args:
        path: None for no file.

    Raises:
        SettingsError: it cannot be written there.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path).expanduser().absolute()
        if self._path is not None and not self._path.parent.is_dir():
            raise SettingsError(f"--ready-file: there is no folder {str(self._path.parent)!r}")
        self.remove()
        self._draft("")  # that it cannot be written should be known before a model is loaded
        self._forget_draft()

    def write(self, content: Mapping[str, Any]) -> None:
        """Write `content` as JSON, visible at once and whole.

        Raises:
            SettingsError: it cannot be written.
        """
        self._draft(json.dumps(content) + "\n", publish=True)

    def remove(self) -> None:
        """Delete it if it is there.

        Raises:
            SettingsError: something that is no file is there, or it cannot be deleted.
        """
        if self._path is None:
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as exc:
            raise SettingsError(f"--ready-file {str(self._path)!r}: {exc.strerror or exc}") from exc

    def _draft(self, text: str, *, publish: bool = False) -> None:
        if self._path is None:
            return
        draft = self._draft_path(self._path)
        try:
            draft.write_text(text)
            if publish:
                draft.replace(self._path)
        except OSError as exc:
            raise SettingsError(f"--ready-file {str(self._path)!r}: {exc.strerror or exc}") from exc

    def _forget_draft(self) -> None:
        if self._path is not None:
            self._draft_path(self._path).unlink(missing_ok=True)

    @staticmethod
    def _draft_path(path: Path) -> Path:
        return path.with_name(f".{path.name}.{os.getpid()}")

    def __enter__(self) -> ReadyFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()
