"""A forked child cannot use what its parent opened, and does it no harm."""

from __future__ import annotations

from collections.abc import Callable

from tests.conformance.discovery.processes import Member


def test_a_forked_child_is_refused_and_the_parent_goes_on(service: str, member: Callable[..., Member]) -> None:
    process = member("fork", service)
    refused = {}
    while (line := process.hear()) != "closed":
        name, error = line.split()
        refused[name] = error
    assert len(refused) == 19
    assert set(refused.values()) == {"ClosedError"}, refused
    assert process.hear() == "kept"
    assert process.process.wait(30) == 0
