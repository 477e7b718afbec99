"""The ready file: JSON that is there while a process is ready, for the process that started it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edl.errors import SettingsError

__all__ = ["ReadyFile"]


class ReadyFile:
    """Writes a file whole or not at all, and deletes it when the process is not ready.

    Args:
        path: None for no file.

    Raises:
        SettingsError: the file cannot be written there.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path).expanduser().absolute()
        if self._path is not None and not self._path.parent.is_dir():
            raise SettingsError(f"--ready-file: there is no folder {str(self._path.parent)!r}")
        self.remove()
        self._draft("")  # that it cannot be written should be known before a model is loaded
        self._forget_draft()

    def write(self, content: Mapping[str, Any]) -> None:
        """Write `content` as JSON.

        Args:
            content: keys and values of the JSON object.

        Raises:
            SettingsError: the file cannot be written.
        """
        self._draft(json.dumps(content) + "\n", publish=True)

    def remove(self) -> None:
        """Delete the file if it is there.

        Raises:
            SettingsError: it is no file, or cannot be deleted.
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
        """Return the file."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Delete the file."""
        self.remove()
