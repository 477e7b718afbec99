"""What a reader and its master owe each other, without either; and what a caller did with its shards last."""

from __future__ import annotations

from edl.master.client.lease_activity import IdleLeases, LeaseActivity
from edl.master.client.shard_session import Report, Shard, ShardSession
from edl.protocol import master as messages


def reply(*leases: int, refused: tuple[int, ...] = (), **fields: object) -> messages.NextReply:
    found = messages.NextReply(**fields)
    for lease in leases:
        found.leases.add(id=lease, term=1, start=lease * 10, stop=lease * 10 + 10)
    for lease in refused:
        found.refused.add(lease=messages.LeaseId(id=lease, term=1), reason="another has it")
    return found


def test_an_unanswered_turn_is_sent_again() -> None:
    session = ShardSession("s")
    first = session.next_turn(2)
    session.report(Report(Shard(9, 1, 0, 9, 90, 100), "done"))
    again = session.next_turn(5)
    assert again is first
    assert (again.request, again.want, list(again.done)) == (1, 2, [])
    session.answer(reply(1, 2))
    second = session.next_turn(0)
    assert (second.request, second.want, list(second.done)) == (2, 0, [9])


def test_reports_know_what_became_of_them() -> None:
    session = ShardSession("s")
    session.next_turn(3)
    given, _ = session.answer(reply(1, 2, 3))
    reports = [Report(given[0], "done"), Report(given[1], "failed", "broken"), Report(given[2], "returned", units=4)]
    for report in reports:
        session.report(report)
    turn = session.next_turn(0)
    assert list(turn.done) == [1]
    assert [(failure.lease.id, failure.reason) for failure in turn.failed] == [(2, "broken")]
    assert [(part.lease.id, part.units) for part in turn.returned] == [(3, 4)]
    assert not reports[0].answered
    session.answer(reply(refused=(2,)))
    assert [report.refused for report in reports] == [None, "another has it", None]
    assert all(report.answered for report in reports)
    assert session.open == {}
    assert not session.owes


def test_a_new_session_of_its_name_shows() -> None:
    session = ShardSession("s")
    assert session.is_same(messages.NextReply(last_request=0))
    session.next_turn(1)
    assert session.is_same(messages.NextReply(last_request=0)), "the turn was not heard"
    assert session.is_same(messages.NextReply(last_request=1)), "the turn was heard, its answer lost"
    session.answer(reply(1))
    assert not session.is_same(messages.NextReply(last_request=0)), "a new session of this name"


def test_a_lost_session_refuses_what_waits() -> None:
    session = ShardSession("s")
    session.next_turn(2)
    given, _ = session.answer(reply(1, 2))
    sent, waiting = Report(given[0], "done"), Report(given[1], "done")
    session.report(sent)
    session.next_turn(0)
    session.report(waiting)
    assert session.abandon("silent for too long") == [sent, waiting]
    assert sent.refused == waiting.refused == "silent for too long"
    assert not session.owes


def test_each_lease_has_its_own_time() -> None:
    activity = LeaseActivity(10.0)
    for lease in (1, 2, 3, 4):
        activity.give(lease, 0.0)
    activity.touch(1, 1.0)
    activity.touch(2, 1.0)
    activity.touch(2, 9.0)
    activity.touch(3, 2.0)
    activity.remove(3)
    assert activity.idle(10.0) == IdleLeases([], [])
    assert activity.idle(11.5) == IdleLeases([1], [4])
    assert activity.idle(20.0) == IdleLeases([1, 2], [4])
    activity.clear()
    activity.touch(1, 0.0)  # it was not given
    activity.remove(1)
    assert activity.idle(100.0) == IdleLeases([], [])


def test_quiet_leases_are_shown_once() -> None:
    activity = LeaseActivity(100.0)
    for lease in (1, 2, 3):
        activity.give(lease, 0.0)
    activity.touch(1, 0.0)
    activity.touch(2, 5.0)
    assert activity.newly_quiet(6.0, 5.0, {1, 2, 3}) == [1]
    assert activity.newly_quiet(11.0, 5.0, {1, 2, 3}) == [2]
    assert activity.newly_quiet(50.0, 5.0, {1, 2, 3}) == []
