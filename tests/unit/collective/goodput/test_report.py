"""What a job's picture is made of."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from edl.collective.goodput.codec import Event
from edl.collective.goodput.node import Mark, NodeRecord
from edl.collective.goodput.records import JobRecord
from edl.collective.goodput.report import COLOURS, columns, unit_of
from edl.collective.goodput.spans import Span, State, plain
from edl.collective.goodput.summary import SILENT_S, as_dict, summarize
from edl.collective.job_records import Member, World
from edl.collective.job_records import State as WorldState

SECOND = 1_000_000
BEGAN_US = 1_700_000_000 * SECOND


def life(node: str, began_s: int, *states: State, step: int = 5, ended: bool = False) -> NodeRecord:
    """A node that spent ten seconds in each of `states`."""
    spans = tuple(plain(state, 10 * SECOND, 1, running=True) for state in states)
    return NodeRecord(node, BEGAN_US + began_s * SECOND, 1, spans, (Mark(0, step, 0),), 2, step, 1.0, 8.0, ended)


def world(*nodes: str, state: WorldState = WorldState.RUNNING) -> World:
    return World(2, state, tuple(Member(name, "x", 1, 1, rank) for rank, name in enumerate(nodes)))


def at(seconds: float) -> int:
    return BEGAN_US + round(seconds * SECOND)


def test_columns_show_the_largest_part() -> None:
    """Columns show what most of each part was."""
    spans = [plain(State.LOAD, 10 * SECOND), plain(State.TRAIN, 20 * SECOND)]
    shown = columns(spans, at(10), at(0), at(50), 5)
    assert shown == [None, State.LOAD, State.TRAIN, State.TRAIN, None]


@given(st.lists(st.tuples(st.sampled_from(State), st.integers(1, 10**9)), min_size=1, max_size=9), st.integers(1, 50))
def test_columns_leave_no_hole_in_a_life(parts: list[tuple[State, int]], count: int) -> None:
    spans = [plain(state, length_us) for state, length_us in parts]
    shown = columns(spans, 0, 0, sum(span.length_us for span in spans), count)
    assert len(shown) == count
    assert None not in shown
    assert set(shown) <= {state for state, _ in parts}


def test_every_state_has_a_colour_of_its_own() -> None:
    assert set(COLOURS) == set(State)
    assert all(one != two for one, two in itertools.combinations(COLOURS.values(), 2))


def test_axis_has_a_sensible_unit() -> None:
    """The axis has a unit that a person would choose."""
    assert [unit_of(round(seconds * 1e6))[0] for seconds in (1, 599, 601, 17_000, 19_000)] == [
        "seconds",
        "seconds",
        "minutes",
        "minutes",
        "hours",
    ]


def test_members_are_ordered() -> None:
    """Members come first by rank then who waits then who is gone."""
    nodes = (
        life("early", 0, State.TRAIN, ended=True),
        life("killed", 0, State.TRAIN, State.TRAIN),
        life("b", 30, State.TRAIN),
        life("a", 31, State.TRAIN),
        life("waits", 31, State.RENDEZVOUS, step=-1),
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
    record = JobRecord("j", world("a"), (life("a", 0, State.TRAIN),), ())
    alive, silent = summarize(record, at(10 + SILENT_S)), summarize(record, at(11 + SILENT_S))
    assert (alive.state, alive.ledger.goodput) == ("running", 1.0)
    assert (silent.state, silent.ledger.amounts[State.DOWN]) == ("down", round((1 + SILENT_S) * SECOND))


def test_ended_job_is_not_down() -> None:
    """An ended job is not down and its nodes left."""
    record = JobRecord("j", world("a", state=WorldState.FAILED), (life("a", 0, State.TRAIN),), ())
    summary = summarize(record, at(1000))
    assert (summary.state, summary.nodes[0].state, summary.ledger.amounts[State.DOWN]) == ("failed", "left", 0)


def test_lost_node_stays_lost() -> None:
    """A node that was lost before the job ended stays lost."""
    nodes = (life("a", 0, State.TRAIN), life("b", 0, *[State.TRAIN] * 3), life("c", 0, *[State.TRAIN] * 3, ended=True))
    summary = summarize(JobRecord("j", world("b", "c", state=WorldState.DONE), nodes, ()), at(1000))
    assert {row.node: row.state for row in summary.nodes} == {"a": "lost", "b": "left", "c": "left"}


def test_no_step_means_unknown_goodput() -> None:
    """Without any step goodput is unknown and not zero."""
    nodes = (life("a", 0, State.LOAD, step=-1),)
    told = as_dict(summarize(JobRecord("j", world("a"), nodes, ()), at(10)), 10)
    assert told["goodput"] is None
    assert told["seconds"]["load"] == 10


def test_json_has_the_last_events_only() -> None:
    events = tuple(Event(at(number), "a", "join") for number in range(5))
    summary = summarize(JobRecord("j", None, (life("a", 0, State.TRAIN),), events), at(10))
    assert [event["at"] for event in as_dict(summary, 2)["events"]] == [1_700_000_003, 1_700_000_004]
    assert as_dict(summary, 0)["events"] == []


def test_foreign_clock_span_is_cut() -> None:
    """A span of another clock before the job is cut."""
    assert columns([Span(plain(State.TRAIN, 4 * SECOND).amounts)], at(-2), at(0), at(4), 2) == [State.TRAIN, None]
