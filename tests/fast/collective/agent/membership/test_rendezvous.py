"""Which nodes train together: rules one by one, then many agents in any order of events."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edl.collective.agent.membership.rendezvous import (
    LocalObservation,
    RendezvousSettings,
    assign_ranks,
    failed_world,
    next_world,
)
from edl.collective.job_records import JobState, Member, Node, World
from edl.errors import ProtocolError
from tests.fast.collective.agent.membership.simulated_job import Job

RULES = RendezvousSettings(min_nodes=1, max_nodes=3, last_call_s=1.0, pause_timeout_s=5.0, takeover_s=10.0)


def node(name: str, **fields: object) -> Node:
    return replace(Node(name, "host", 100 + ord(name[0]), 2), **fields)  # type: ignore[arg-type]


def running(*names: str, generation: int = 3) -> World:
    members = tuple(Member(name, "host", 1, 2, 2 * place) for place, name in enumerate(names))
    return World(generation, JobState.RUNNING, members)


def nodes(*those: Node) -> dict[str, Node]:
    return {one.id: one for one in those}


def names(world: World | None) -> list[str]:
    assert world is not None
    return [member.id for member in world.nodes]


# --- One rule at a time. ---


def test_job_forms_when_no_more_follow() -> None:
    """A job forms when enough nodes came and no more follow."""
    there = nodes(node("a"), node("b"))
    assert next_world(World(), there, LocalObservation(quiet_s=0.5), RULES) is None
    world = next_world(World(), there, LocalObservation(quiet_s=1.0), RULES)
    assert world is not None
    assert (world.generation, world.state, names(world)) == (0, JobState.RUNNING, ["a", "b"])
    assert [member.first_rank for member in world.nodes] == [0, 2]


def test_a_full_job_forms_at_once() -> None:
    there = nodes(*(node(name) for name in "abcd"))
    assert names(next_world(World(), there, LocalObservation(), RULES)) == ["a", "b", "c"]


def test_too_few_nodes_wait() -> None:
    rules = replace(RULES, min_nodes=2)
    assert next_world(World(), nodes(node("a")), LocalObservation(quiet_s=1e9), rules) is None
    assert next_world(World(), nodes(node("a"), node("b", leaving=True)), LocalObservation(quiet_s=1e9), rules) is None


def test_lost_member_ends_the_generation() -> None:
    """A lost member means the next generation at once."""
    world = next_world(running("a", "b", "c"), nodes(node("a"), node("c")), LocalObservation(), RULES)
    assert names(world) == ["a", "c"]
    assert world is not None
    assert world.generation == 4
    assert "lost b" in world.message


def test_lost_member_is_replaced() -> None:
    """A lost member is replaced by a node that waits."""
    assert names(
        next_world(running("a", "b", "c"), nodes(node("a"), node("c"), node("d")), LocalObservation(), RULES)
    ) == [
        "a",
        "d",
        "c",
    ]


def test_forgiven_errors_count_in_all_worlds() -> None:
    """Errors that were forgiven are counted through all worlds."""
    there = nodes(node("a"), node("b"))
    world = next_world(running("a", "b"), there, LocalObservation(restart="it raised", forgives=True), RULES)
    assert world is not None
    assert world.forgiven == 1
    for moment in (LocalObservation(restart="a worker died"), LocalObservation(restart="it raised", forgives=True)):
        members = tuple(replace(member, port=1) for member in world.nodes)  # they have another one for the next world
        world = next_world(replace(world, nodes=members), there, moment, RULES)
        assert world is not None
    assert world.forgiven == 2
    world = next_world(world, nodes(node("a")), LocalObservation(), replace(RULES, min_nodes=2))
    assert world is not None
    assert (world.state, world.forgiven) == (JobState.FORMING, 2)
    world = next_world(world, there, LocalObservation(quiet_s=1e9), RULES)
    assert world is not None
    assert World.decode(world.encode()).forgiven == 2


def test_too_few_survivors_form_again() -> None:
    world = next_world(running("a", "b"), nodes(node("a")), LocalObservation(), replace(RULES, min_nodes=2))
    assert world is not None
    assert (world.state, world.generation, world.nodes) == (JobState.FORMING, 4, ())
    assert "1 of at least 2" in world.message


def test_all_lost_is_followed_when_sure() -> None:
    """All members lost are followed only when they have surely stopped."""
    waiting = nodes(node("c"))
    assert next_world(running("a", "b"), waiting, LocalObservation(quiet_s=9.9), RULES) is None
    assert names(next_world(running("a", "b"), waiting, LocalObservation(quiet_s=10.0), RULES)) == ["c"]
    assert names(next_world(running("a", "b"), waiting, LocalObservation(dead=frozenset("ab")), RULES)) == ["c"]
    assert next_world(running("a", "b"), waiting, LocalObservation(dead=frozenset("a")), RULES) is None


def test_next_generation_waits_for_a_port() -> None:
    """The next generation waits for the first nodes next port."""
    world = running("a", "b")
    used = world.nodes[0].port
    assert next_world(world, nodes(node("a", port=used)), LocalObservation(), RULES) is None
    assert names(next_world(world, nodes(node("a", port=used + 1)), LocalObservation(), RULES)) == ["a"]
    assert names(next_world(world, nodes(node("b", port=used)), LocalObservation(), RULES)) == ["b"]


def test_restart_keeps_the_members() -> None:
    """A restart keeps the members and says why."""
    there = nodes(node("a"), node("b"))
    world = next_world(running("a", "b"), there, LocalObservation(restart="a worker died"), RULES)
    assert names(world) == ["a", "b"]
    assert world is not None
    assert (world.message, world.generation) == ("a worker died", 4)


def test_nodes_join_after_a_pause() -> None:
    """Nodes join after a pause that a member asks for."""
    world, there = running("a", "b"), nodes(node("a"), node("b"), node("c"))
    assert next_world(world, there, LocalObservation(node="c"), RULES) is None, (
        "whoever joins does not know what can pause"
    )
    asked = next_world(world, there, LocalObservation(node="a", pause_step=17), RULES)
    assert asked == replace(world, pause_at=17)
    assert asked is not None
    assert next_world(asked, there, LocalObservation(node="b", pause_step=20, pausing_s=1.0), RULES) is None
    there["a"] = replace(there["a"], paused=3)
    assert next_world(asked, there, LocalObservation(node="b", pausing_s=1.0), RULES) is None
    there["b"] = replace(there["b"], paused=3)
    assert names(next_world(asked, there, LocalObservation(node="b", pausing_s=1.0), RULES)) == ["a", "b", "c"]


def test_pause_is_not_waited_for_forever() -> None:
    """Workers that do not pause are not waited for for ever."""
    world, there = replace(running("a"), pause_at=17), nodes(node("a"), node("b"))
    assert next_world(world, there, LocalObservation(node="a", pausing_s=4.9), RULES) is None
    assert names(next_world(world, there, LocalObservation(node="a", pausing_s=5.0), RULES)) == ["a", "b"]


def test_stepless_script_is_not_paused() -> None:
    """A script that reports no steps is not asked to pause."""
    there = nodes(node("a"), node("b"))
    assert names(next_world(running("a"), there, LocalObservation(node="a"), RULES)) == ["a", "b"]


def test_unwanted_pause_is_taken_back() -> None:
    """A pause is taken back when nobody wants it any more."""
    world = replace(running("a"), pause_at=17)
    assert next_world(world, nodes(node("a")), LocalObservation(node="a", pausing_s=3.0), RULES) == running("a")
    ending = nodes(node("a", finished=3), node("b"))
    assert next_world(replace(running("a", "b"), pause_at=17), ending, LocalObservation(node="b"), RULES) == running(
        "a", "b"
    )


def test_leaver_is_replaced_after_a_pause() -> None:
    """A node leaves after a pause and the one that waits takes its place."""
    world = replace(running("a", "b", "c"), pause_at=9)
    there = nodes(node("a", paused=3, leaving=True), node("b", paused=3), node("c", paused=3), node("d"))
    assert names(next_world(world, there, LocalObservation(node="b"), RULES)) == ["d", "b", "c"]


def test_full_job_does_not_pause_for_reserve() -> None:
    """A full job does not pause for nodes in reserve."""
    there = nodes(*(node(name) for name in "abcd"))
    assert next_world(running("a", "b", "c"), there, LocalObservation(node="a", pause_step=5), RULES) is None


def test_job_is_done_when_all_finished() -> None:
    """A job is done when every member finished this generation."""
    world = running("a", "b")
    there = nodes(node("a", finished=3), node("b", finished=2))
    assert next_world(world, there, LocalObservation(node="a"), RULES) is None
    there["b"] = replace(there["b"], finished=3)
    done = next_world(world, there, LocalObservation(node="a"), RULES)
    assert done is not None
    assert done.state is JobState.DONE
    assert next_world(done, {}, LocalObservation(quiet_s=1e9), RULES) is None


def test_nobody_joins_a_job_that_is_ending() -> None:
    there = nodes(node("a", finished=3), node("b"), node("c"))
    assert next_world(running("a", "b"), there, LocalObservation(node="b", pause_step=4), RULES) is None


def test_a_failed_job_stays_failed() -> None:
    world = failed_world(replace(running("a"), pause_at=3), "ValueError: x")
    assert (world.state, world.message, world.pause_at) == (JobState.FAILED, "ValueError: x", None)
    assert next_world(world, nodes(node("a"), node("b")), LocalObservation(quiet_s=1e9), RULES) is None


@pytest.mark.parametrize(
    ("before", "present", "after"),
    [
        ([], "ba", "ba"),
        (list("abc"), "abc", "abc"),
        (list("abc"), "ac", "ac"),
        (list("abc"), "bc", "cb"),
        (list("abc"), "xbc", "xbc"),
        (list("abc"), "acx", "axc"),
        (list("abcd"), "d", "d"),
        (list("ab"), "abxy", "abxy"),
    ],
)
def test_survivors_keep_their_place(before: list[str], present: str, after: str) -> None:
    assert assign_ranks(before, present) == list(after)


@given(st.lists(st.integers(0, 9), unique=True), st.lists(st.integers(0, 9), unique=True, min_size=1))
def test_nobody_moves_who_need_not(before: list[int], present: list[int]) -> None:
    old, there = [str(one) for one in before], [str(one) for one in present]
    order = assign_ranks(old, there)
    assert sorted(order) == sorted(there)
    for name in there:
        if name in old and old.index(name) < len(there):
            assert order.index(name) == old.index(name)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b'{"id": 1, "addr": 2}', b'{"state": "odd"}', b"\xff"])
def test_records_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="record"):
        World.decode(data)
    with pytest.raises(ProtocolError, match="record"):
        Node.decode(data)


def test_newer_record_fields_are_ignored() -> None:
    """What a later version adds to a record breaks nobody."""
    for record in (node("a"), running("a", "b")):
        values = json.loads(record.encode())
        values["later"] = 1
        for member in values.get("nodes", []):
            member["later"] = 2
        assert type(record).decode(json.dumps(values).encode()) == record


# --- Many agents, in any order of events. ---

EVENTS = ("turn",) * 9 + ("tick",) * 5 + ("join", "leave", "kill", "stop", "continue", "cut", "mend", "break")


def happen(job: Job, event: str, which: int) -> None:
    if event == "tick":
        job.tick()
    elif event == "join":
        if len(job.agents) < 8:
            job.join(reports_steps=which % 3 > 0)
    elif job.agents:
        agent = list(job.agents.values())[which % len(job.agents)]
        if event == "turn":
            job.turn(agent)
        elif agent.exit or not agent.alive:
            pass
        elif event == "stop":
            agent.stopped = True
        elif event == "continue":
            job.go_on(agent)
        elif event == "mend":
            agent.cut = False
        else:
            {"leave": job.leave, "kill": job.kill, "cut": job.cut, "break": job.break_worker}[event](agent)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 3),
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 7)), max_size=250),
)
def test_any_history_comes_to_rest(minimum: int, more: int, history: list[tuple[str, int]]) -> None:
    """Any history keeps the rules and comes to rest."""
    job = Job(RendezvousSettings(minimum, minimum + more, takeover_s=5.0))
    for _ in range(minimum):
        job.join()
    for event, which in history:
        happen(job, event, which)
    job.settle()
    there = [agent for agent in job.present if not agent.record.leaving]
    if len(there) >= minimum:
        assert job.world.state is JobState.RUNNING, job.world
        assert {member.id for member in job.world.nodes} <= {agent.name for agent in there}
        assert len(job.world.nodes) == min(len(there), minimum + more)
        assert job.world.pause_at is None
        assert all(agent.generation == job.world.generation for agent in job.present if agent.running)
    else:
        assert not any(agent.running for agent in job.present)
    assert not any(agent.record.leaving for agent in job.present), "who wanted to leave has left"
    job.finish_all()
    job.settle(20)
    if len(there) >= minimum:
        assert job.world.state is JobState.DONE
        assert all(agent.exit == "done" for agent in there)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 7)), max_size=120), st.integers(0, 7))
def test_script_error_ends_it_for_all(history: list[tuple[str, int]], which: int) -> None:
    """An error of the script ends it for everybody."""
    job = Job(RendezvousSettings(1, 3, takeover_s=5.0))
    job.join()
    for event, other in history:
        happen(job, event, other)
    job.settle()
    running_agents = [agent for agent in job.present if agent.running]
    if not running_agents:
        return
    job.fail(running_agents[which % len(running_agents)])
    job.settle(5)
    assert job.world.state is JobState.FAILED
    assert not job.present
