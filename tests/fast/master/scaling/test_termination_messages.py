"""What an agent writes of its end is what the master reads; other text is only text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.collective.agent.health.failures import ExitCause
from edl.collective.agent.termination_message import TerminationMessage
from edl.master.scaling.termination_messages import parse_termination_message
from edl.master.scaling.terminations import TerminationCause, TerminationReport, find_termination_cause


@given(
    st.sampled_from([cause.value for cause in ExitCause] + [""]),
    st.integers(0, 255),
    st.none() | st.integers(0, 2**62),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=300),
)
def test_agents_message_is_read(cause: str, code: int, kills: int | None, text: str) -> None:
    """The master does not import the agent, so the two are compared here."""
    written = TerminationMessage(cause, code, 3, "host-1", kills, text).encode().decode()
    assert parse_termination_message(written) == TerminationReport(
        exit_code=code, oom_kills=kills, agent_cause=cause, message=text
    )


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (TerminationMessage("killed", 137, 0, "host", 1, "killed"), TerminationCause.OUT_OF_MEMORY),
        (TerminationMessage("error", 1, 0, "host", 0, "ValueError"), TerminationCause.USER_ERROR),
        (TerminationMessage("", 143, -1, "host", 0, "asked to leave (SIGTERM)"), TerminationCause.PREEMPTED),
        (TerminationMessage("hardware", 69, 0, "host", 0, "ECC"), TerminationCause.HARDWARE),
        (TerminationMessage("", 75, -1, "host", 0, "no store"), TerminationCause.QUORUM_MISSED),
        (TerminationMessage("", 74, -1, "host", 0, "not stored"), TerminationCause.NOT_STORED),
        (TerminationMessage("", 0, -1, "host", 0, "done"), TerminationCause.SUCCEEDED),
    ],
)
def test_cause_by_message(message: TerminationMessage, cause: TerminationCause) -> None:
    assert find_termination_cause(parse_termination_message(message.encode().decode())).cause is cause


@pytest.mark.parametrize(
    "text",
    [
        *("", "Traceback: a script wrote this", "{", "[]", "null", "7", '{"cause": 7}', '{"exit_code": 1}'),
        *('{"cause": "err', "[" * 100_000, '{"cause": "x"} and more', "\ufffd\x00", "9" * 5000),
    ],
)
def test_other_text_is_only_a_message(text: str) -> None:
    assert parse_termination_message(text) == TerminationReport(message=text.strip())


@pytest.mark.parametrize("value", [None, "1", -1, 1.5, True, 1e300, [1], {}, 2**70])
def test_wrong_values_are_unknown(value: object) -> None:
    text = json.dumps({"cause": "killed", "exit_code": value, "oom_kills": value, "message": value})
    message = value if isinstance(value, str) else ""
    assert parse_termination_message(text) == TerminationReport(agent_cause="killed", message=message)
