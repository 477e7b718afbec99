"""Where the labels of a job lie: every worker writes down its folder, so that each can say them all at the end."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket

from edl.discovery import Store
from edl.errors import DiscoveryError

__all__ = ["label_folders", "note_folder"]

logger = logging.getLogger(__name__)


def note_folder(store: Store, job: str, folder: str) -> None:
    """Write down that this host has labels of a job. A store that is away is no reason to stop.

    Args:
        store: of the job.
        job: its name.
        folder: where the labels are.
    """
    value = json.dumps({"host": socket.gethostname(), "folder": os.path.realpath(folder)}).encode()
    try:
        store.put(f"{_prefix(job)}{hashlib.blake2b(value, digest_size=8).hexdigest()}", value)
    except DiscoveryError as exc:
        logger.warning("that labels lie in %s is not noted in the store: %s", folder, exc)


def label_folders(store: Store, job: str) -> dict[str, list[str]]:
    """Return the folders with labels of a job, and the hosts that wrote to a folder of that name.

    Args:
        store: of the job.
        job: its name.

    Raises:
        DiscoveryError: the store does not answer.
    """
    found: dict[str, list[str]] = {}
    for entry in store.list(_prefix(job)):
        try:
            value = json.loads(entry.value)
            found.setdefault(str(value["folder"]), []).append(str(value["host"]))
        except (ValueError, TypeError, KeyError):
            logger.warning("the store has nonsense at %s", entry.key)
    return {folder: sorted(hosts) for folder, hosts in sorted(found.items())}


def _prefix(job: str) -> str:
    return f"label_folders/{job}/"
