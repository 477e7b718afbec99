"""A forked child cannot use what its parent opened, and does it no harm."""

from __future__ import annotations

from collections.abc import Callable

from tests.fast.discovery.conformance.processes import Member


def test_forked_child_is_refused(service: str, member: Callable[..., Member]) -> None:
    """A forked child is refused and the parent goes on."""
    process = member("fork", service)
    refused = {}
    while (line := process.hear()) != "closed":
        name, error = line.split()
        refused[name] = error
    assert len(refused) == 19
    assert set(refused.values()) == {"ClosedError"}, refused
    assert process.hear() == "kept"
    assert process.process.wait(30) == 0
