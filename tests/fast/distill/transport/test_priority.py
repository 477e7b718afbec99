"""With which priority a server is asked: decisions without a server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.discovery.registry import Instance
from edl.distill.engine.connection import _complete_spec
from edl.distill.teachers import Teachers
from edl.distill.transport.priority import Priority, RequestPriority, choose_priority, parse_priority
from edl.distill.transport.schema import OutputSpec
from edl.errors import SettingsError


@pytest.mark.parametrize(
    ("wanted", "levels", "level", "rows", "in_flight", "warned"),
    [
        ("auto", 1, 0, 0, 0, False),
        ("auto", 3, 3, 0, 0, False),
        ("default", 3, 0, 0, 0, False),
        ("lowest", 3, 3, 4, 1, False),
        ("lowest", 0, 0, 4, 1, True),
        (2, 3, 2, 0, 0, False),
        (7, 3, 3, 0, 0, True),
        (7, 0, 0, 0, 0, True),
    ],
)
def test_how_a_model_is_asked(
    wanted: Priority, levels: int, level: int, rows: int, in_flight: int, warned: bool
) -> None:
    found = choose_priority(wanted, supported=True, levels=levels, max_batch=64, instances=2)
    assert (found.level, found.max_rows, found.max_in_flight, bool(found.warning)) == (level, rows, in_flight, warned)


@settings(max_examples=50)
@given(
    st.sampled_from(["auto", "lowest", "default"]) | st.integers(1, 2**32 - 1),
    st.booleans(),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**40),
)
def test_any_configuration_gives_a_level(
    wanted: Any, supported: bool, levels: int, max_batch: int, instances: int
) -> None:
    found = choose_priority(wanted, supported=supported, levels=levels, max_batch=max_batch, instances=instances)
    assert 0 <= found.level <= min(levels, 2**63 - 1), "an int64 on the wire"
    assert supported or found.level == 0
    assert found.max_rows <= max_batch


@pytest.mark.parametrize("value", [0, True, 1.5, None, "", "low", "0", "-1", "²", "9" * 30, 2**32])
def test_what_is_no_priority(value: Any) -> None:
    with pytest.raises(SettingsError, match="priority="):
        Teachers(service="bert", priority=value)
    if isinstance(value, str):
        with pytest.raises(SettingsError, match="priority="):
            parse_priority(value)


def test_registration_fills_what_is_open(caplog: pytest.LogCaptureFixture) -> None:
    def complete(priority: Priority, registered: str) -> Priority:
        instance = Instance("bert", "a", "10.0.0.1", 8001, meta={"priority": registered} if registered else {})
        return _complete_spec(OutputSpec(("y",), priority=priority), instance).priority

    assert complete("auto", "") == "auto"
    assert complete("auto", "lowest") == "lowest"
    assert complete("auto", "3") == 3
    assert complete("default", "lowest") == "default", "the student's own word"
    assert complete("auto", "urgent!") == "auto"
    assert "the registration of a: priority='urgent!'" in caplog.text
    assert RequestPriority().level == 0
