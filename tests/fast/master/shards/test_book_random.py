"""A book of shards as one would write it first: a record for each unit of each epoch, and everything found by search.

It does not decide which shards are given. It is told, and holds what is given against its own records.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.errors import ConflictError, EDLError, SettingsError
from edl.master.shards import ShardBook
from edl.protocol import master

Unit = tuple[int, int]
"""An epoch and a unit in it."""


@dataclass
class NaiveLease:
    id: int
    term: int
    session: str
    epoch: int
    shard: int
    start: int
    stop: int
    marked: int

    def rest(self) -> list[Unit]:
        return [(self.epoch, unit) for unit in range(self.marked, self.stop)]


@dataclass
class NaiveSession:
    id: str
    holder: str
    turn: master.Turn | None = None
    reply: master.NextReply | None = None
    marks: list[tuple[str, int]] = field(default_factory=list)
    # What this reader consumed, and what it had in hand at its marks, each with the index of the mark that covers it.
    consumed: list[tuple[int, Unit]] = field(default_factory=list)
    open: dict[tuple[str, int], list[Unit]] = field(default_factory=dict)


def named(number: int, term: int) -> master.LeaseId:
    return master.LeaseId(id=number, term=term)


class Pair:
    """A book, beside it a book that is restored from a snapshot now and then, and the naive records."""

    def __init__(self, spec: master.DatasetSpec) -> None:
        self.spec = spec
        self.book = ShardBook()
        self.restored = ShardBook()
        self.commands: list[bytes] = []
        self.term = 0
        self.state: dict[Unit, Any] = {}
        self.leases: dict[int, NaiveLease] = {}
        self.given: set[int] = set()
        self.failures: dict[tuple[int, int], int] = {}
        self.live: dict[str, NaiveSession] = {}
        self.past: dict[str, NaiveSession] = {}
        self.units = spec.units
        self.ended = spec.HasField("units")
        self.names = 0
        self.begin_term()
        self.apply(create_dataset=master.CreateDataset(dataset="d", spec=spec))

    @property
    def by_checkpoint(self) -> bool:
        return self.spec.commit == master.COMMIT_CHECKPOINT

    # --- Both books. ---

    def apply(self, **kind: Any) -> Any:
        command = master.Command(**kind, time_ms=1000 * len(self.commands))
        before = self.book.snapshot() if len(self.commands) % 7 == 0 else None
        try:
            reply = self.book.apply(command)
        except EDLError as exc:
            with pytest.raises(type(exc), match=re.escape(str(exc))):
                self.restored.apply(command)
            if before is not None:
                self.same(before)
            raise
        self.commands.append(command.SerializeToString())
        assert self.restored.apply(command) == reply
        return reply

    def same(self, before: bytes) -> None:
        assert self.book.snapshot() == before, "a refused command changed something"

    def restore(self) -> None:
        data = self.restored.snapshot()
        assert data == self.book.snapshot()
        self.restored = ShardBook.restore(data)
        assert self.restored.snapshot() == data
        assert self.restored.datasets["d"].status() == self.book.datasets["d"].status()
        assert list(self.restored.sessions) == list(self.book.sessions)

    def replay(self) -> None:
        book = ShardBook()
        for data in self.commands:
            book.apply(master.Command.FromString(data))
        assert book.snapshot() == self.book.snapshot()

    # --- Commands. ---

    def begin_term(self) -> None:
        self.term += 1
        self.apply(begin_term=master.BeginTerm(term=self.term))

    def open(self, holder: str) -> str:
        self.names += 1
        session = NaiveSession(f"s{self.names}", holder)
        session.marks.append((session.id, 0))
        session.open[session.id, 0] = []
        self.apply(open_session=master.OpenSession(dataset="d", session=session.id, holder=holder))
        self.live[session.id] = session
        return session.id

    def turn(
        self,
        session_id: str,
        done: list[tuple[int, int]],
        failed: list[tuple[int, int, int]],
        returned: list[tuple[int, int, int]],
        want: int,
    ) -> master.NextReply:
        session = self.live[session_id]
        turn = master.Turn(
            session=session_id,
            request=session.turn.request + 1 if session.turn else 1,
            done=[lease for lease, _ in done],
            done_terms=[term for _, term in done],
            failed=[master.Failure(lease=named(*lease), units=units, reason="bad") for *lease, units in failed],
            returned=[master.Partial(lease=named(*lease), units=units) for *lease, units in returned],
            want=want,
        )
        reply: master.NextReply = self.apply(turn=turn)
        session.turn, session.reply = turn, reply
        expected = []
        for kind, (lease_id, term, *units) in [
            *(("done", report) for report in done),
            *(("returned", report) for report in returned),
            *(("failed", report) for report in failed),
        ]:
            lease = self.leases.get(lease_id)
            if lease is None or lease.session != session_id or lease.term != term:
                expected.append((lease_id, term))
                continue
            self.consume(session, lease, lease.stop if kind == "done" else lease.start + units[0])
            self.release(lease, failed=kind == "failed")
            if kind == "done" and not any(
                state == "poisoned" and epoch == lease.epoch and unit // self.spec.shard_size == lease.shard
                for (epoch, unit), state in self.state.items()
            ):
                self.failures.pop((lease.epoch, lease.shard), None)
        assert [(refusal.lease.id, refusal.lease.term) for refusal in reply.refused] == expected
        assert all(refusal.reason for refusal in reply.refused)
        self.take(session_id, reply.leases)
        assert len(reply.leases) <= want
        if len(reply.leases) < want:
            assert reply.finished == self.finished()
            assert bool(reply.wait_s) != reply.finished
        assert reply.poisoned == len(self.poisoned())
        return reply

    def repeat_turn(self, session_id: str) -> None:
        session = self.live[session_id]
        if session.turn is not None:
            before = self.book.snapshot()
            assert self.apply(turn=session.turn) == session.reply
            assert self.book.snapshot() == before

    def mark(self, session_id: str, number: int, partial: list[tuple[int, int]]) -> None:
        """Partial: leases with the units that were consumed of them."""
        session = self.live[session_id]
        terms = {lease.id: lease.term for lease in self.leases.values()}
        parts = [master.Partial(lease=named(lease, terms[lease]), units=units) for lease, units in partial]
        self.apply(mark=master.Mark(session=session_id, mark=number, partial=parts))
        for lease_id, units in partial:
            lease = self.leases[lease_id]
            self.consume(session, lease, lease.start + units)
        session.marks.append((session_id, number))
        session.open[session_id, number] = [
            unit for lease in self.leases.values() if lease.session == session_id for unit in lease.rest()
        ]

    def resume(self, session_id: str, of_session: str, number: int) -> None:
        """A new session goes on where another was at a mark; errors are the caller's to expect."""
        resume = master.Resume(dataset="d", session=session_id, of_session=of_session, mark=number, of_holder="x")
        reply = self.apply(resume=resume)
        assert self.apply(resume=resume) == reply
        old = self.history_of(of_session, session_id)
        if old.id in self.live:
            self.lose(old.id, failed=True)
        at = old.marks.index((of_session, number) if (of_session, number) in old.marks else old.marks[0])
        assert at >= len(old.marks) - 16
        for covered, unit in old.consumed:
            if covered > at:
                assert self.state[unit] == "done"
                self.state[unit] = "todo"
        new = self.live[session_id]
        new.marks = old.marks[: at + 1]
        new.consumed = [(covered, unit) for covered, unit in old.consumed if covered <= at]
        new.open = old.open
        wanted = {unit for unit in old.open[old.marks[at]] if self.state[unit] == "todo"}
        self.take(session_id, reply.leases)
        assert {unit for lease in reply.leases for unit in self.leases[lease.id].rest()} == wanted
        del self.past[old.id]

    def expire(self, leases: list[int], sessions: list[str]) -> None:
        self.apply(expire=master.Expire(leases=leases, sessions=sessions))
        for lease_id in leases:
            lease = self.leases.get(lease_id)
            if lease is not None and self.by_checkpoint:
                self.lose(lease.session, failed=True)
            elif lease is not None:
                self.release(lease, failed=not self.spec.ignore_expiries)
        for session in sessions:
            if session in self.live:
                self.lose(session, failed=True)

    def close(self, session_id: str, commit: bool) -> None:
        self.apply(close_session=master.CloseSession(session=session_id, commit=commit))
        self.lose(session_id, failed=False, keep=commit)

    def retry(self) -> None:
        reply = self.apply(retry_poisoned=master.RetryPoisoned(dataset="d"))
        shards = self.poisoned()
        assert reply.shards == len(shards)
        for epoch, shard in shards:
            self.failures.pop((epoch, shard), None)
        for unit, state in self.state.items():
            if state == "poisoned":
                self.state[unit] = "todo"

    def progress(self) -> None:
        """Out and in again: readers are gone, and what they had is to do."""
        data = self.book.datasets["d"].progress()
        self.apply(restore_progress=master.RestoreProgress(dataset="d", progress=data))
        for session in list(self.live):
            self.lose(session, failed=False)
        self.past.clear()

    def extend(self, units: int) -> None:
        self.apply(extend_dataset=master.ExtendDataset(dataset="d", units=self.units + units))
        self.units += units

    def end(self) -> None:
        self.apply(end_dataset=master.EndDataset(dataset="d"))
        self.ended = True

    # --- Records. ---

    def history_of(self, session: str, asking: str) -> NaiveSession:
        for found in [*self.past.values(), *self.live.values()]:
            if found.id != asking and (found.id == session or session in {name for name, _ in found.marks}):
                return found
        raise KeyError(session)

    def take(self, session: str, leases: Any) -> None:
        for found in leases:
            assert found.id not in self.given, "an id was given twice"
            self.given.add(found.id)
            lease = NaiveLease(
                *(found.id, found.term, session, found.epoch, found.shard), found.start, found.stop, found.start
            )
            assert lease.term == self.term
            assert found.start < found.stop <= self.units
            assert found.start // self.spec.shard_size == (found.stop - 1) // self.spec.shard_size == found.shard
            assert 0 <= found.epoch < (self.spec.epochs or 10**9)
            for unit in lease.rest():
                assert self.state.get(unit, "todo") == "todo", f"{unit} was given while it is {self.state[unit]}"
                self.state[unit] = lease.id
            self.leases[lease.id] = lease

    def consume(self, session: NaiveSession, lease: NaiveLease, stop: int) -> None:
        for unit in range(lease.marked, stop):
            assert self.state[lease.epoch, unit] == lease.id
            self.state[lease.epoch, unit] = "done"
            session.consumed.append((len(session.marks), (lease.epoch, unit)))
        lease.marked = max(lease.marked, stop)

    def release(self, lease: NaiveLease, failed: bool) -> None:
        del self.leases[lease.id]
        rest = lease.rest()
        if rest and failed:
            key = (lease.epoch, lease.shard)
            self.failures[key] = self.failures.get(key, 0) + 1
            failed = self.failures[key] >= self.spec.max_failures
        for unit in rest:
            self.state[unit] = "poisoned" if failed else "todo"

    def lose(self, session_id: str, failed: bool, keep: bool = False) -> None:
        session = self.past[session_id] = self.live.pop(session_id)
        for lease in [lease for lease in self.leases.values() if lease.session == session_id]:
            self.release(lease, failed=failed and not self.spec.ignore_expiries)
        if self.by_checkpoint and not keep:
            last = len(session.marks)
            for covered, unit in session.consumed:
                if covered == last:
                    assert self.state[unit] == "done"
                    self.state[unit] = "todo"
            session.consumed = [(covered, unit) for covered, unit in session.consumed if covered < last]

    def poisoned(self) -> set[tuple[int, int]]:
        size = self.spec.shard_size
        return {(epoch, unit // size) for (epoch, unit), state in self.state.items() if state == "poisoned"}

    def finished(self) -> bool:
        if not self.ended or self.leases:  # one that was consumed as a whole is still to be reported
            return False
        epochs = range(max(self.spec.epochs, 1))
        states = [self.state.get((epoch, unit), "todo") for epoch in epochs for unit in range(self.units)]
        return all(state in ("done", "poisoned") for state in states)

    def check(self) -> None:
        status = self.book.datasets["d"].status()
        done = sum(state == "done" for state in self.state.values())
        assert status["units_done"] == done
        assert status["shards"]["poisoned"] == len(self.poisoned())
        size = self.spec.shard_size
        doing = {(lease.epoch, lease.shard) for lease in self.leases.values()} - self.poisoned()
        assert status["shards"]["doing"] == len(doing)
        epoch = status["epoch"]
        begun = [(at, unit) for at in range(epoch + 1) for unit in range(self.units)]
        todo = {(at, unit // size) for at, unit in begun if self.state.get((at, unit), "todo") == "todo"}
        assert status["shards"]["todo"] == len(todo - doing - self.poisoned()), status
        assert sum(status["shards"].values()) == (epoch + 1) * -(-self.units // size)
        for session in self.live.values():
            info = self.book.sessions[session.id]
            assert set(info.leases) == {lease.id for lease in self.leases.values() if lease.session == session.id}


def _part(lease: NaiveLease, choice: random.Random) -> tuple[int, int, int]:
    return lease.id, lease.term, choice.randint(0, lease.stop - lease.start)


def step(pair: Pair, choice: random.Random) -> None:
    live, past = list(pair.live), list(pair.past)
    kinds = ["open", "turn", "turn", "turn", "turn", "turn", "repeat", "expire_lease", "expire", "close", "term"]
    kinds += ["retry", "restore", "progress"]
    if pair.by_checkpoint:
        kinds += ["mark", "mark", "mark", "resume", "resume"]
    if not pair.spec.HasField("units"):
        kinds += ["extend", "extend", "end"]
    kind = choice.choice(kinds)
    if kind == "open" and len(live) < 5:
        pair.open(choice.choice("abc"))
    elif kind == "turn" and live:
        session = choice.choice(live)
        mine = [lease for lease in pair.leases.values() if lease.session == session]
        choice.shuffle(mine)
        done = [(lease.id, lease.term) for lease in mine[: choice.randint(0, 3)]]
        if choice.random() < 0.15:  # a late report, or another's
            done.append((choice.randint(0, len(pair.given) + 1), choice.randint(0, pair.term)))
        rest = [lease for lease in mine if (lease.id, lease.term) not in done]
        failed = [_part(lease, choice) for lease in rest[:1] if choice.random() < 0.3]
        returned = [_part(lease, choice) for lease in rest[1:2] if choice.random() < 0.2]
        pair.turn(session, done, failed, returned, choice.randint(0, 4))
    elif kind == "repeat" and live:
        pair.repeat_turn(choice.choice(live))
    elif kind == "expire_lease" and pair.leases:
        pair.expire([choice.choice(list(pair.leases)), 10**6], [])
    elif kind == "expire" and live and choice.random() < 0.5:
        pair.expire([], [choice.choice(live), "nobody"])
    elif kind == "close" and live and choice.random() < 0.5:
        pair.close(choice.choice(live), choice.random() < 0.5)
    elif kind == "term" and choice.random() < 0.2:
        pair.begin_term()
    elif kind == "retry" and choice.random() < 0.3:
        pair.retry()
    elif kind == "restore":
        pair.restore()
    elif kind == "progress" and choice.random() < 0.1:
        pair.progress()
    elif kind == "mark" and live:
        session = choice.choice(live)
        mine = [lease for lease in pair.leases.values() if lease.session == session and choice.random() < 0.7]
        partial = [(lease.id, choice.randint(lease.marked - lease.start, lease.stop - lease.start)) for lease in mine]
        pair.mark(session, pair.live[session].marks[-1][1] + choice.randint(1, 2), partial)
    elif kind == "resume" and (past or live):
        _resume(pair, choice)
    elif kind == "extend" and not pair.ended:
        pair.extend(choice.randint(0, 7))
    elif kind == "end" and choice.random() < 0.02:
        pair.end()


def _resume(pair: Pair, choice: random.Random) -> None:
    old = choice.choice([*pair.past.values(), *pair.live.values()])
    at = choice.choice(range(max(0, len(old.marks) - 18), len(old.marks)))
    of_session, number = old.marks[at]
    session = pair.open(old.holder)
    # The naive history is that of the latest session, which a mark of an earlier one belongs to as well.
    kept = at >= len(old.marks) - 16
    superseded = old.id in pair.live and of_session != old.id
    if kept and not superseded:
        pair.resume(session, of_session, number)
        return
    try:
        pair.resume(session, of_session, number)
    except (ConflictError, SettingsError):
        return
    raise AssertionError("a mark was resumed that is not kept, or of a reader that lives")


def drain(pair: Pair) -> None:
    """Let a new reader do what is left; every unit of every epoch is done, or was given up."""
    for session in list(pair.live):
        pair.close(session, True)
    if not pair.ended:
        pair.end()
    session = pair.open("last")
    reports: list[tuple[int, int]] = []
    for _ in range(10_000):
        reply = pair.turn(session, reports, [], [], 3)
        reports = [(lease.id, lease.term) for lease in reply.leases]
        if reply.finished:
            break
    else:
        raise AssertionError("it never ends")
    if pair.by_checkpoint:
        assert pair.book.datasets["d"].is_done == (not pair.live[session].consumed)
        pair.mark(session, 1000, [])
    assert pair.book.datasets["d"].is_done
    expected = {(epoch, unit) for epoch in range(max(pair.spec.epochs, 1)) for unit in range(pair.units)}
    assert set(pair.state) == expected
    assert set(pair.state.values()) <= {"done", "poisoned"}


commits = st.sampled_from([master.COMMIT_REPORT, master.COMMIT_CHECKPOINT])

bounded = st.builds(
    master.DatasetSpec,
    kind=st.just("range"),
    units=st.integers(0, 30),
    shard_size=st.integers(1, 7),
    seed=st.integers(0, 9),
    shuffle=st.booleans(),
    epochs=st.integers(1, 3),
    max_failures=st.integers(1, 3),
    commit=commits,
    ignore_expiries=st.booleans(),
)

streams = st.builds(
    master.DatasetSpec,
    kind=st.just("follow"),
    shard_size=st.integers(1, 7),
    max_failures=st.integers(1, 3),
    commit=commits,
    ignore_expiries=st.booleans(),
)


@settings(max_examples=40)
@given(st.one_of(bounded, streams), st.integers(0, 2**32), st.integers(20, 400))
def test_book_agrees_with_naive_records(spec: master.DatasetSpec, seed: int, steps: int) -> None:
    pair = Pair(spec)
    choice = random.Random(seed)
    for number in range(steps):
        step(pair, choice)
        if number % 10 == 0:
            pair.check()
    drain(pair)
    pair.check()
    pair.restore()
    pair.replay()
