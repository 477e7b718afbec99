"""Who gets what, in cases that a person can follow."""

from __future__ import annotations

import math

import pytest

from edl.master.scaling.arbitration import Allocation, ArbitrationSettings, JobRequest, arbitrate


def counts(allocation: Allocation, *jobs: str) -> list[int]:
    return [allocation.count_workers(job) for job in jobs]


def test_a_newcomer_takes_from_the_lowest() -> None:
    jobs = [JobRequest("high", 2, 8, priority=2, weight=4.0), JobRequest("low", 2, 8, priority=0)]
    new = JobRequest("new", 4, 4, priority=1, submitted_s=5.0)
    before = arbitrate({"n1": 8, "n2": 8}, jobs, {})
    assert counts(before, "high", "low") == [8, 8]
    after = arbitrate({"n1": 8, "n2": 8}, [*jobs, new], before.placements)
    assert counts(after, "high", "low", "new") == [8, 4, 4]
    assert after.changes["low"] == "gave workers to new, which needs its minimum"


def test_a_worker_needs_one_node() -> None:
    """Eight free GPUs on four nodes hold no worker of four, and best fit keeps whole nodes free."""
    assert arbitrate({f"n{i}": 2 for i in range(4)}, [JobRequest("a", 1, 1, 4)], {}).pending == ("a",)
    found = arbitrate({"n1": 8, "n2": 3}, [JobRequest("a", 3, 3, 1)], {})
    assert found.placements == {"a": {"n2": 3}}


def test_shrunk_node_gives_surplus_first() -> None:
    """An online load takes GPUs of a node back: surplus goes before minima, whatever the priorities."""
    jobs = [JobRequest("low", 2, 2, priority=0), JobRequest("high", 1, 4, priority=5)]
    found = arbitrate({"n": 4}, jobs, {"low": {"n": 2}, "high": {"n": 4}})
    assert counts(found, "low", "high") == [2, 2]
    below = arbitrate({"n": 1}, jobs, found.placements)
    assert counts(below, "low", "high") == [0, 1]
    assert below.pending == ("low",)


def test_nothing_moves_near_the_end() -> None:
    """20 s before its end a job neither grows nor gives: a pause of 30 s is never worth it."""
    ending = JobRequest("ending", 1, 8, remaining=100.0)
    assert counts(arbitrate({"n": 8}, [ending], {"ending": {"n": 5}}), "ending") == [5]
    new = JobRequest("new", 1, 8, submitted_s=1.0)
    for remaining, after in ((160.0, [7, 1]), (1e9, [4, 4])):
        job = JobRequest("ending", 1, 8, remaining=remaining)
        assert counts(arbitrate({"n": 8}, [job, new], {"ending": {"n": 7}, "new": {"n": 1}}), "ending", "new") == after


def test_who_moved_often_stays() -> None:
    """Pollux's damping: with 100 moves of 30 s in an hour, no gain is believed."""
    tired = JobRequest("a", 1, 8, age_s=3600.0, moves=100)
    assert counts(arbitrate({"n": 8}, [tired], {"a": {"n": 2}}), "a") == [2]
    rested = JobRequest("a", 1, 8, age_s=3600.0, moves=1)
    assert counts(arbitrate({"n": 8}, [rested], {"a": {"n": 2}}), "a") == [8]


def test_large_jobs_do_not_starve() -> None:
    """Small jobs come and go for ever; a large one that has waited long enough gets the GPUs they leave."""

    def started(patience_s: float | None) -> bool:
        placements = {f"s{number}": {"n": 2} for number in range(4)}
        small = [JobRequest(f"s{number}", 2, 2, submitted_s=float(number)) for number in range(40)]
        for turn in range(30):
            big = JobRequest("big", 8, 8, submitted_s=0.5, waited_s=60.0 * turn)
            placements.pop(f"s{turn}", None)
            found = arbitrate(
                {"n": 8}, [big, *small[turn + 1 : turn + 6]], placements, ArbitrationSettings(patience_s=patience_s)
            )
            placements = {job: dict(places) for job, places in found.placements.items()}
            if "big" in placements:
                return True
        return False

    assert started(600.0)
    assert not started(None)


def test_impossible_jobs_hold_nobody_up() -> None:
    wide = JobRequest("wide", 1, 1, 16, priority=9, waited_s=1e9)
    many = JobRequest("many", 100, 100, 1, priority=9, waited_s=1e9)
    found = arbitrate({"n1": 8, "n2": 8}, [wide, many, JobRequest("a", 1, 1)], {})
    assert found.pending == ("many", "wide")
    assert counts(found, "a") == [1]


@pytest.mark.parametrize(
    ("nodes", "jobs"),
    [({"n": -1}, [JobRequest("a", 1, 1)]), ({"n": 1}, [JobRequest("a", 1, 1), JobRequest("a", 1, 2)])],
)
def test_nonsense_is_refused(nodes: dict[str, int], jobs: list[JobRequest]) -> None:
    with pytest.raises(ValueError):
        arbitrate(nodes, jobs, {})


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_workers": 3},
        {"gpus": 0},
        {"weight": math.nan},
        {"pause_s": -1.0},
        {"min_workers": -1},
    ],
)
def test_nonsense_jobs_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="job"):
        JobRequest("job", **{"min_workers": 1, "max_workers": 2, **wrong})  # type: ignore[arg-type]


def test_pauses_count_when_reclaiming() -> None:
    """Of one priority, a job at its end gives where others have no more; it pauses then anyway, and gives more."""
    ending = JobRequest("ending", 1, 9, remaining=0.0)
    other = JobRequest("other", 1, 9)
    placements = {"ending": {"n1": 5}, "other": {"n2": 4}}
    for least, shares in ((2, [5, 2]), (4, [3, 2])):
        new = JobRequest("new", least, least, submitted_s=1.0)
        assert counts(arbitrate({"n1": 5, "n2": 4}, [ending, other, new], placements), "ending", "other") == shares
