"""Marks of readers, and what a session takes over that resumes at one."""

from __future__ import annotations

from typing import NamedTuple

from edl.errors import ConflictError, SettingsError
from edl.master.shards.dataset_shards import MARKS_KEPT, DatasetShards, ReaderHistory, ReaderMark, ReaderSession
from edl.master.shards.units import UnitRange
from edl.protocol import master
from edl.quoting import shown

__all__ = ["ResumePlan", "mark_session", "plan_resume"]


class ResumePlan(NamedTuple):
    """Everything that a session takes over when it resumes at a mark."""

    history: ReaderHistory
    at: int  # index of the mark in it
    undone: list[UnitRange]  # consumed after the mark, and done again
    open: list[UnitRange]  # in the reader's hand at the mark
    fenced: ReaderSession | None  # the live session that ends now


def mark_session(session: ReaderSession, command: master.Mark) -> bool:
    """Cover what a session has reported, and parts of what it has, by a mark.

    Returns:
        Whether anything has changed; a mark that is repeated changes nothing.

    Raises:
        SettingsError: The data set commits by reports, or a part is impossible or of a lease of another session.
        ConflictError: A later mark was made.
    """
    dataset = session.dataset
    if not dataset.by_checkpoint:
        raise SettingsError(f"data set {dataset.name} commits by reports: create it with commit='checkpoint' for marks")
    history = dataset.histories[session.id]
    last = history.marks[-1]
    if (last.session, last.number) == (session.id, command.mark) and last.number:
        return False
    if command.mark <= last.number:
        raise ConflictError(f"mark {command.mark} of session {session.id}: {last.number} was made, and marks grow")
    _check_parts(session, command)
    mark = ReaderMark(session.id, command.mark, history.pending)
    history.pending = []
    for part in command.partial:
        lease = session.leases[part.lease.id]
        dataset.finish(lease, lease.start + part.units)
    mark.consumed += history.pending
    history.pending = []
    mark.open = [
        UnitRange(lease.epoch, lease.shard, lease.marked, lease.stop)
        for lease in session.leases.values()
        if lease.marked < lease.stop
    ]
    history.marks.append(mark)
    return True


def _check_parts(session: ReaderSession, command: master.Mark) -> None:
    seen: set[int] = set()
    for part in command.partial:
        lease = session.leases.get(part.lease.id)
        if lease is None or lease.term != part.lease.term or lease.id in seen:
            raise SettingsError(
                f"mark {command.mark} of session {session.id} names lease {part.lease.id}, which it does not have"
                " or names twice"
            )
        if part.units < 0 or not lease.marked <= lease.start + part.units <= lease.stop:
            raise SettingsError(
                f"mark {command.mark} of session {session.id}: {part.units} units of lease {lease.id}, of which"
                f" {lease.marked - lease.start} to {lease.stop - lease.start} can have been consumed"
            )
        seen.add(lease.id)


def plan_resume(session: ReaderSession, dataset: DatasetShards, command: master.Resume) -> ResumePlan | None:
    """Decide what a new session takes over that resumes at a mark. Changes nothing.

    Returns:
        The plan; None for the beginning of a holder that has never read.

    Raises:
        SettingsError: The data set commits by reports, or is another than the session's; or the mark is not kept.
        ConflictError: Another session that lives has resumed it, or `session` is not new.
    """
    if session.dataset is not dataset or not dataset.by_checkpoint:
        raise SettingsError(
            f"data set {dataset.name}: session {session.id} reads another, or what is reported there is done at once"
        )
    if session.leases or session.last_request or not dataset.histories[session.id].is_fresh:
        raise ConflictError(f"session {session.id} has begun to read: resume in a new one")
    history = dataset.find_history(command.of_session, command.of_holder, session.id)
    name = shown(command.of_session or command.of_holder, 200)
    if history is None and not command.of_session and not command.mark:
        return None
    if history is None:
        raise SettingsError(
            f"nothing is kept of {name}: it never read data set {dataset.name}, or ended too long ago."
            " Restore the data set's progress, or read without resuming"
        )
    index = history.find(command.of_session, command.mark)
    if index is None and not command.mark:
        index = history.find("", 0)  # the beginning, of whichever session
    if index is None:
        kept = ", ".join(str(mark.number) for mark in history.marks)
        raise SettingsError(
            f"mark {command.mark} of {name} is not kept: those of its history, the last {MARKS_KEPT}, are {kept}, and"
            " marks after one that was resumed are dropped. Load a checkpoint with one of them, or restore the data"
            " set's progress"
        )
    live = dataset.sessions.get(history.session)
    if live is not None and command.of_session != live.id:
        raise ConflictError(
            f"{shown(live.holder)} continues {name} in session {live.id}, which is live: it ends when it is closed, or"
            f" is silent for {dataset.spec.session_s:g} s"
        )
    undone = [part for mark in list(history.marks)[index + 1 :] for part in mark.consumed]
    if live is None:
        undone += history.pending  # of one that was closed and kept it
    return ResumePlan(history, index, undone, list(history.marks[index].open), live)
