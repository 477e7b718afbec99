"""The contract of a journal; `tests/fast/master/journal` holds every implementation to it."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from types import TracebackType

from typing_extensions import Self

__all__ = ["Journal"]


class Journal(abc.ABC):
    """Records in order, and a snapshot that stands for those before it.

    - **Terms.** A writer begins a term, which ends those of all writers before it: whatever these write afterwards is
      refused and not there. So of two masters that both think they lead, a single one is heard.
    - **Groups.** What one call of `append` writes is there as a whole or not at all, whenever the power goes.
    - **After a `JournalError`** it is not known whether what was written is there. The object refuses everything but
      `close` from then on; a new one reads what is there.
    - **Threads and forks.** Methods may be called from several threads, and take turns. A child of the process that
      opened it must not use it: methods raise `ClosedError`, and `close` does nothing.
    - **Time.** Every call has a deadline of some seconds, which the implementation's opener takes.
    """

    @property
    def snapshot_due(self) -> bool:
        """Whether so much was appended since the last snapshot that reading it would take seconds.

        A writer may have other reasons of its own for a snapshot.
        """
        return False

    @abc.abstractmethod
    def begin_term(self) -> int:
        """Become the only writer.

        Comes first: what is loaded before it may be less than what is there when the term begins.

        Returns:
            The term's number, larger than all before.

        Raises:
            JournalError: it cannot be written.
            ProtocolError: what is there is damaged.
        """

    @abc.abstractmethod
    def load(self) -> tuple[bytes | None, list[bytes]]:
        """Read everything.

        Returns:
            The newest snapshot, None if there is none; and the records that were appended after it, in their order.

        Raises:
            JournalError: it cannot be read.
            ProtocolError: what is there is damaged.
        """

    @abc.abstractmethod
    def append(self, records: Sequence[bytes]) -> None:
        """Write records behind those that are there. When it returns they outlive the process, and a loss of power.

        Args:
            records: a group; an empty one writes nothing. A record may have any size.

        Raises:
            LeaseLostError: another writer has begun a term, or this one never did.
            JournalError: they cannot be written, or it is not known whether they are.
        """

    @abc.abstractmethod
    def snapshot(self, state: bytes) -> None:
        """Put a snapshot in the place of everything that was appended; at every moment either is there as a whole.

        Args:
            state: after exactly the records that were appended until now.

        Raises:
            LeaseLostError: another writer has begun a term, or this one never did.
            JournalError: it cannot be written, or it is not known whether it is.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Release what is open. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
