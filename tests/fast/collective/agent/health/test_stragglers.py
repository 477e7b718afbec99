"""Stragglers in simulated time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edl.collective.agent.health.stragglers import StragglerChange, StragglerDetector, StragglerSettings

SETTINGS = StragglerSettings(windows=3)


def test_persistent_slowness_is_named_once() -> None:
    """A rank that is slow persistently is named once and cleared once."""
    detector = StragglerDetector(SETTINGS)
    slow = {0: 1.0, 1: 1.0, 2: 1.6}
    assert [detector.observe_window(slow) for _ in range(2)] == [[], []]
    assert detector.observe_window(slow) == [StragglerChange(2, "named", 1.6, 1.0)]
    assert [detector.observe_window(slow) for _ in range(9)] == [[]] * 9
    between = {0: 1.0, 1: 1.0, 2: 1.3}
    assert [detector.observe_window(between) for _ in range(9)] == [[]] * 9
    well = {0: 1.0, 1: 1.0, 2: 1.1}
    assert [detector.observe_window(well) for _ in range(3)][-1] == [StragglerChange(2, "cleared", 1.1, 1.0)]
    assert detector.named == set()


def test_slower_of_two_is_named() -> None:
    """Of two ranks the slower is named and alone nobody is."""
    detector = StragglerDetector(SETTINGS)
    assert [str(*detector.observe_window({0: 0.2, 1: 0.1})) for _ in range(3)][-1] == (
        "rank 0 is slow: 0.2 s of its own a step, the others 0.1 s"
    )
    assert [StragglerDetector(SETTINGS).observe_window({0: 9.0}) for _ in range(9)] == [[]] * 9


@given(st.lists(st.lists(st.floats(0.9, 1.3), min_size=4, max_size=4), max_size=30))
def test_noise_names_nobody(windows: list[list[float]]) -> None:
    detector = StragglerDetector(SETTINGS)
    assert not any(detector.observe_window(dict(enumerate(own_s))) for own_s in windows)


def test_microseconds_do_not_count() -> None:
    """Differences of microseconds do not count."""
    detector = StragglerDetector(SETTINGS)
    assert not any(detector.observe_window({0: 0.001, 1: 0.004}) for _ in range(9))
