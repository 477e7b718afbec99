"""Who is tested with whom, and what follows from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.collective.agent.health.node_check.pairing import (
    CheckRoundResult,
    Groups,
    NodeCheckResult,
    first_groups,
    second_groups,
    summarize_rounds,
)

GOOD = CheckRoundResult("cpu", 1.0, 0.1)
FACTOR = 2.0


def simulate(nodes: list[str], faulty: set[str], silent: set[str]) -> list[tuple[Groups, dict[str, CheckRoundResult]]]:
    """Both rounds, where a group with a faulty or silent node fails for all of its members."""
    rounds: list[tuple[Groups, dict[str, CheckRoundResult]]] = []
    groups = first_groups(nodes)
    for _ in range(2):
        results = {}
        for group in groups:
            works = not (faulty | silent) & set(group) or len(group) == 1
            for node in set(group) - silent:
                results[node] = GOOD if works else CheckRoundResult("cpu", 1.0, None, "could not reduce")
        rounds.append((groups, results))
        groups = second_groups(nodes, results, FACTOR)
    return rounds


@pytest.mark.parametrize(
    ("count", "groups"),
    [(0, []), (1, ["a"]), (2, ["ab"]), (3, ["abc"]), (4, ["ab", "cd"]), (5, ["ab", "cde"])],
)
def test_the_first_round_pairs_neighbours(count: int, groups: list[str]) -> None:
    assert first_groups("abcde"[:count]) == tuple(tuple(group) for group in groups)


@given(st.integers(4, 9).filter(lambda count: count != 5), st.integers(0, 8), st.booleans())
def test_one_bad_node_is_named(count: int, which: int, silent: bool) -> None:
    """One bad node among good ones is named and nobody else."""
    nodes = [f"n{number}" for number in range(count)]
    bad = {nodes[which % count]}
    found = summarize_rounds(nodes, simulate(nodes, set() if silent else bad, bad if silent else set()), FACTOR)
    assert set(found.faulty) == bad
    assert found.slow == {}


def test_a_silent_node_among_three_is_named() -> None:
    nodes = list("abc")
    assert summarize_rounds(nodes, simulate(nodes, set(), {"c"}), FACTOR) == NodeCheckResult({"c": "no answer"})


def test_slow_node_is_named_by_its_own_time() -> None:
    first = {"a": GOOD, "b": CheckRoundResult("cpu", 3.0, 0.5), "c": GOOD, "d": GOOD}
    first["a"] = CheckRoundResult("cpu", 1.0, 0.5)  # it waited for b
    again = second_groups("abcd", first, FACTOR)
    assert {frozenset(group) for group in again} in (
        {frozenset("da"), frozenset("cb")},
        {frozenset("ca"), frozenset("db")},
    )
    partner = next(name for group in again if "b" in group for name in group if name != "b")
    second = {
        **dict.fromkeys("acd", GOOD),
        "b": CheckRoundResult("cpu", 3.1, 0.5),
        partner: CheckRoundResult("cpu", 1.0, 0.5),
    }
    found = summarize_rounds("abcd", [(first_groups("abcd"), first), (again, second)], FACTOR)
    assert found.faulty == {}
    assert found.slow == {
        "b": "compute on cpu took 3 s, the median of all nodes is 1 s; "
        "reduce on cpu took 0.5 s, the median of all nodes is 0.1 s"
    }


def test_devices_are_compared_with_alike() -> None:
    results = {
        "a": CheckRoundResult("cuda", 0.01, 0.1),
        "b": CheckRoundResult("cuda", 0.01, 0.1),
        "c": CheckRoundResult("cpu", 9.0, 0.1),
    }
    assert summarize_rounds("abc", [(first_groups("abc"), results)], FACTOR) == NodeCheckResult()
