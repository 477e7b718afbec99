"""A master's decisions, kept so that they outlive it: records in order, and a snapshot in place of older ones.

`journal` is the contract; `sqlite` keeps it in a file, `stored` in a Store that another host can reach.
What does not belong here: what the bytes mean (`edl.master.shards`), who may lead, and when a snapshot is due.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from urllib.parse import unquote

from edl.discovery import Store
from edl.discovery.urls import KUBERNETES_GONE
from edl.errors import SettingsError
from edl.master.journal.journal import Journal

__all__ = ["Journal", "open_journal", "set_aside"]

logger = logging.getLogger(__name__)

_ACCEPTED = "accepted are sqlite:///absolute/path/to/file, and store:JOB beside a store"


def open_journal(url: str, *, store: Store | None = None, timeout_s: float = 5.0) -> Journal:
    """Open the journal that `url` names.

    - `sqlite:///absolute/path`: a file on a local disk, created if necessary, with its folder. A master on another
      machine cannot take it over.
    - `store:JOB`: keys of `store` in the folder `journals/JOB`. A master on any machine that reaches the store can take
      it over. Its promise is the store's: Consul and etcd have written to the disks of most servers when they answer.

    Opening neither reads nor begins a term.

    Args:
        url: Where the journal is.
        store: Store for `store:JOB`; the caller closes it, after the journal.
        timeout_s: Seconds to wait for another process's transaction on a file, or to keep asking a store that is away,
            beyond the store's own timeout.

    Returns:
        The journal, which the caller closes.

    Raises:
        SettingsError: The URL is invalid, or the file is something else.
        JournalError: The file cannot be opened at the moment.
    """
    if not 0 < timeout_s < float("inf"):
        raise SettingsError(f"timeout_s={timeout_s!r}: must be a finite number above 0")
    scheme, _, rest = url.partition(":")
    if scheme == "sqlite":
        from edl.master.journal.sqlite import SqliteJournal

        return SqliteJournal(_path(url), timeout_s=timeout_s)
    if scheme == "store":
        from edl.master.journal.stored import StoreJournal

        if store is None:
            raise SettingsError(f"journal {url!r}: needs a store; {_ACCEPTED}")
        return StoreJournal(store, rest, timeout_s=timeout_s)
    if scheme == "kubernetes":
        raise SettingsError(f"journal {url!r}: {KUBERNETES_GONE}. The journal is store:JOB then")
    raise SettingsError(f"journal {url!r}: unknown; {_ACCEPTED}")


def set_aside(url: str) -> None:
    """Rename the file of a journal that is not in use, so that the next journal there begins empty.

    Raises:
        SettingsError: The journal is not a file, or cannot be renamed.
    """
    path = Path(_path(url))
    kept = path.with_name(f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        for suffix in ("-wal", "-shm", ""):
            found = path.with_name(path.name + suffix)
            if found.exists():
                found.rename(kept.with_name(kept.name + suffix))
    except OSError as exc:
        raise SettingsError(f"journal {path} cannot be set aside: {exc.strerror or exc}") from exc
    if kept.exists():
        logger.info("the journal until now is kept in %s", kept)


def _path(url: str) -> str:
    scheme, _, rest = url.partition(":")
    path = unquote(rest.removeprefix("//"))
    if scheme != "sqlite" or not rest.startswith("///") or path.endswith("/") or "\0" in path or set("?#") & set(rest):
        raise SettingsError(f"journal {url!r}: not the absolute path of a file; {_ACCEPTED}")
    return "/" + path.lstrip("/")
