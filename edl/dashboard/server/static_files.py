"""The page's files, read once: what is not among them when the server starts is never sent.

What does not belong here: routes (`app`).
"""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["StaticFile", "read_static_files"]

FOLDER: Final = Path(__file__).parent.parent / "static"
"""Part of the package."""
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""The machine's own table of types may say something else, with which a browser runs no module."""


@dataclass(frozen=True)
class StaticFile:
    """A file.

    Attributes:
        data: what is in it.
        content_type: as the header has it.
        etag: changes with what is in it.
    """

    data: bytes
    content_type: str
    etag: str


def read_static_files(folder: Path = FOLDER) -> Mapping[str, StaticFile]:
    """Read all files of a folder.

    Args:
        folder: with the files; links out of it are left out.

    Returns:
        The files by their path in the folder, with slashes.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.resolve().is_relative_to(folder.resolve()):
            data = path.read_bytes()
            guessed = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
            content_type = _TYPES.get(path.suffix, guessed)
            etag = hashlib.sha256(data).hexdigest()[:32]
            found[path.relative_to(folder).as_posix()] = StaticFile(data, content_type, etag)
    return found
