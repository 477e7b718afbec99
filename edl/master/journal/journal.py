"""The contract of a journal; `tests/fast/master/journal` holds every implementation to it."""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from edl.errors import ClosedError, DiscoveryError, EDLError, JournalError, LeaseLostError, ProtocolError
from edl.quoting import shown
from edl.resource import Resource

__all__ = ["Journal"]


class Journal(Resource, abc.ABC):
    """Records in order, and a snapshot that stands for those before it.

    - **Terms.** A writer begins a term, which ends those of all writers before it: whatever these write afterwards is
      refused and not there. So of two masters that both believe they lead, only one can write.
    - **Groups.** What one call of `append` writes is there as a whole or not at all, whenever the power goes.
    - **After a `JournalError`** it is not known whether what was written is there. The object refuses everything but
      `close` from then on; a new one reads what is there.
    - **Threads and forks.** Methods may be called from several threads, and take turns. A child of the process that
      opened it must not use it: methods raise `ClosedError`, and `close` does nothing.
    - **Time.** Every call has a deadline of some seconds: `timeout_s` of `open_journal`.

    An implementation makes each of its calls in a `_turn`. `name` has the journal's place, for errors.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        super().__init__()
        self.name: Final = name
        self._timeout_s = timeout_s
        self._turns = threading.Lock()
        self._broken = ""  # the message of the error after which all calls are refused

    @property
    def snapshot_due(self) -> bool:
        """Whether reading what was appended since the last snapshot would take seconds."""
        return False

    @abc.abstractmethod
    def begin_term(self) -> int:
        """Become the only writer. Call it before `load`, or the writer before this one may append in between.

        Returns:
            The term's number, larger than all before.

        Raises:
            JournalError: The journal cannot be written.
            ProtocolError: It is damaged.
        """

    @abc.abstractmethod
    def load(self) -> tuple[bytes | None, list[bytes]]:
        """Read everything.

        Returns:
            The newest snapshot, None if there is none; and the records that were appended after it, in their order.

        Raises:
            JournalError: The journal cannot be read.
            ProtocolError: It is damaged.
        """

    @abc.abstractmethod
    def append(self, records: Sequence[bytes]) -> None:
        """Write a group of records of any size. When it returns they outlive the process, and a loss of power.

        Raises:
            LeaseLostError: Another writer has begun a term, or this one never did.
            JournalError: They cannot be written, or it is not known whether they are.
        """

    @abc.abstractmethod
    def snapshot(self, state: bytes) -> None:
        """Replace the records that were appended until now with `state`, at once: no reader sees half of each.

        Raises:
            LeaseLostError: Another writer has begun a term, or this one never did.
            JournalError: It cannot be written, or it is not known whether it is.
        """

    @contextlib.contextmanager
    def _turn(self, what: str) -> Iterator[None]:
        """Let calls of several threads take turns; after an error all are refused."""
        self._check_process()
        if not self._turns.acquire(timeout=self._timeout_s):
            raise JournalError(f"journal {self.name}: cannot {what}: another thread is using it")
        try:
            self._check()
            if self._broken:
                raise JournalError(self._broken)
            try:
                yield
            except (LeaseLostError, ProtocolError):  # of which it is known that nothing was written
                raise
            except BaseException as exc:
                why = shown(exc).removeprefix(f"journal {self.name}: ")
                self._broken = f"journal {self.name}: cannot {what}: {why}"
                if isinstance(exc, EDLError) and not isinstance(exc, ClosedError):
                    busy = isinstance(exc, DiscoveryError) or getattr(exc, "busy", False)
                    raise JournalError(self._broken, busy=busy) from exc
                raise
        finally:
            self._turns.release()
