"""A book with a data set, and commands in few words."""

from __future__ import annotations

from typing import Any

from edl.master.shards import ShardBook
from edl.protocol import master


class Job:
    def __init__(self, **spec: Any) -> None:
        self.book = ShardBook()
        self.requests: dict[str, int] = {}
        self.apply(begin_term=master.BeginTerm(term=1))
        self.spec = master.DatasetSpec(**{"kind": "range", "units": 100, "shard_size": 10, "epochs": 1, **spec})
        self.apply(create_dataset=master.CreateDataset(dataset="d", spec=self.spec))

    def apply(self, **kind: Any) -> Any:
        return self.book.apply(master.Command(**kind))

    def open(self, session: str, holder: str = "") -> master.NextReply:
        reply: master.NextReply = self.apply(
            open_session=master.OpenSession(dataset="d", session=session, holder=holder or session)
        )
        return reply

    def turn(self, session: str, want: int = 0, done: Any = (), **rest: Any) -> master.NextReply:
        self.requests[session] = self.requests.get(session, 0) + 1
        return self.book.turn(
            master.Turn(
                session=session,
                request=self.requests[session],
                want=want,
                done=[lease.id for lease in done],
                done_terms=[lease.term for lease in done],
                **rest,
            )
        )

    def fail(self, session: str, lease: master.Lease, reason: str, want: int = 0) -> master.NextReply:
        return self.turn(session, want, failed=[master.Failure(lease=lease_id(lease), reason=reason)])

    def mark(self, session: str, number: int, *parts: tuple[master.Lease, int]) -> None:
        partial = [master.Partial(lease=lease_id(lease), units=units) for lease, units in parts]
        self.apply(mark=master.Mark(session=session, mark=number, partial=partial))

    def resume(self, session: str, of_session: str, mark: int, holder: str = "") -> master.ResumeReply:
        command = master.Resume(dataset="d", session=session, of_session=of_session, of_holder=holder, mark=mark)
        reply: master.ResumeReply = self.apply(resume=command)
        return reply

    def expire(self, *sessions: str, leases: Any = ()) -> None:
        self.apply(expire=master.Expire(sessions=sessions, leases=[lease.id for lease in leases]))

    def shards(self) -> dict[str, int]:
        counts: dict[str, int] = self.book.status("d")["shards"]
        return counts


def lease_id(lease: master.Lease) -> master.LeaseId:
    return master.LeaseId(id=lease.id, term=lease.term)


def bounds(leases: Any) -> list[tuple[int, int]]:
    return [(lease.start, lease.stop) for lease in leases]


def checkpointed(**spec: Any) -> Job:
    return Job(commit=master.COMMIT_CHECKPOINT, **spec)
