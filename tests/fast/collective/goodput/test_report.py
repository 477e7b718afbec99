"""What a job's picture is made of."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from edl.collective.goodput.codec import Event
from edl.collective.goodput.node import NodeRecord, ProgressMark
from edl.collective.goodput.records import JobRecord
from edl.collective.goodput.report import COLOURS, choose_time_unit, main_categories
from edl.collective.goodput.spans import Span, TimeCategory, span_of
from edl.collective.goodput.summary import SILENT_S, as_dict, summarize
from edl.collective.job_records import JobState, Member, World

SECOND = 1_000_000
BEGAN_US = 1_700_000_000 * SECOND


def life(node: str, began_s: int, *states: TimeCategory, step: int = 5, ended: bool = False) -> NodeRecord:
    """A node that spent ten seconds in each of `states`."""
    spans = tuple(span_of(state, 10 * SECOND, 1, running=True) for state in states)
    return NodeRecord(
        node, BEGAN_US + began_s * SECOND, 1, spans, (ProgressMark(0, step, 0),), 2, step, 1.0, 8.0, ended
    )


def world(*nodes: str, state: JobState = JobState.RUNNING) -> World:
    return World(2, state, tuple(Member(name, "x", 1, 1, rank) for rank, name in enumerate(nodes)))


def at(seconds: float) -> int:
    return BEGAN_US + round(seconds * SECOND)


@given(
    st.lists(st.tuples(st.sampled_from(TimeCategory), st.integers(1, 10**9)), min_size=1, max_size=9),
    st.integers(1, 50),
)
def test_columns_leave_no_hole_in_a_life(parts: list[tuple[TimeCategory, int]], count: int) -> None:
    spans = [span_of(state, length_us) for state, length_us in parts]
    shown = main_categories(spans, 0, 0, sum(span.length_us for span in spans), count)
    assert len(shown) == count
    assert None not in shown
    assert set(shown) <= {state for state, _ in parts}


def test_every_state_has_a_colour_of_its_own() -> None:
    assert set(COLOURS) == set(TimeCategory)
    assert all(one != two for one, two in itertools.combinations(COLOURS.values(), 2))


def test_axis_has_a_sensible_unit() -> None:
    assert [choose_time_unit(round(seconds * 1e6))[0] for seconds in (1, 599, 601, 17_000, 19_000)] == [
        "seconds",
        "seconds",
        "minutes",
        "minutes",
        "hours",
    ]


def test_members_are_ordered() -> None:
    """Members come first by rank then who waits then who is gone."""
    nodes = (
        life("early", 0, TimeCategory.TRAIN, ended=True),
        life("killed", 0, TimeCategory.TRAIN, TimeCategory.TRAIN),
        life("b", 30, TimeCategory.TRAIN),
        life("a", 31, TimeCategory.TRAIN),
        life("waits", 31, TimeCategory.RENDEZVOUS, step=-1),
    )
    summary = summarize(JobRecord("j", world("a", "b"), nodes, ()), at(41))
    assert [(row.node, row.state) for row in summary.nodes] == [
        ("a", "train"),
        ("b", "train"),
        ("waits", "rendezvous"),
        ("killed", "lost"),
        ("early", "left"),
    ]
    assert (summary.world_size, summary.samples_per_s, summary.steps_per_s) == (2, 16.0, 1.0)


def test_silent_running_job_is_down() -> None:
    """A running job goes down when nobody gives a sign of life."""
    record = JobRecord("j", world("a"), (life("a", 0, TimeCategory.TRAIN),), ())
    alive, silent = summarize(record, at(10 + SILENT_S)), summarize(record, at(11 + SILENT_S))
    assert (alive.state, alive.ledger.goodput) == ("running", 1.0)
    assert (silent.state, silent.ledger.amounts[TimeCategory.DOWN]) == ("down", round((1 + SILENT_S) * SECOND))


def test_no_step_means_unknown_goodput() -> None:
    nodes = (life("a", 0, TimeCategory.LOAD, step=-1),)
    told = as_dict(summarize(JobRecord("j", world("a"), nodes, ()), at(10)), 10)
    assert told["goodput"] is None
    assert told["seconds"]["load"] == 10


def test_json_has_the_last_events_only() -> None:
    events = tuple(Event(at(number), "a", "join") for number in range(5))
    summary = summarize(JobRecord("j", None, (life("a", 0, TimeCategory.TRAIN),), events), at(10))
    assert [event["at"] for event in as_dict(summary, 2)["events"]] == [1_700_000_003, 1_700_000_004]
    assert as_dict(summary, 0)["events"] == []


def test_foreign_clock_span_is_cut() -> None:
    assert main_categories([Span(span_of(TimeCategory.TRAIN, 4 * SECOND).amounts)], at(-2), at(0), at(4), 2) == [
        TimeCategory.TRAIN,
        None,
    ]
