"""Files by path or URL: which there are, how large they are, and ranges of their bytes; errors name the file.

What does not belong here: what the bytes mean.
"""

from __future__ import annotations

from edl.master.datasets.storage.base import (
    DataStorage,
    FileStat,
    StorageError,
    check_paths,
    file_changed,
    has_wildcards,
    is_url,
)

__all__ = [
    "DataStorage",
    "FileStat",
    "StorageError",
    "check_paths",
    "file_changed",
    "has_wildcards",
    "is_url",
    "open_storage",
]


def open_storage(location: str) -> DataStorage:
    """Return the storage that a path or URL is on.

    Args:
        location: a path on this machine, or a URL that fsspec knows, such as `s3://bucket/key`.

    Raises:
        SettingsError: there is no such kind of storage here.
    """
    if not is_url(location):
        from edl.master.datasets.storage.local import LocalStorage

        return LocalStorage()
    from edl.master.datasets.storage.remote import RemoteStorage

    return RemoteStorage(location)
