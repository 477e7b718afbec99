"""Causes of ends, what an agent writes of its own, and what is done about them: the functions are pure, and total."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.collective.agent.ending import ExitCode, TerminationMessage
from edl.collective.agent.health.failures import ExitCause
from edl.master.scaling.terminations import (
    RelaunchAction,
    TerminationCause,
    TerminationReport,
    decide_relaunch,
    find_termination_cause,
    parse_termination_message,
)

Cause = TerminationCause
Report = TerminationReport


@pytest.mark.parametrize(
    ("report", "cause"),
    [
        (Report(exit_code=0), Cause.SUCCEEDED),
        (Report(pod_phase="Succeeded"), Cause.SUCCEEDED),
        (Report(exit_code=1), Cause.USER_ERROR),
        (Report(exit_code=255), Cause.UNKNOWN),
        (Report(exit_code=255, agent_cause="error"), Cause.USER_ERROR),
        (Report(exit_code=1, agent_cause="error", node_ready=False), Cause.USER_ERROR),
        (Report(exit_code=137), Cause.KILLED),
        (Report(exit_code=137, container_reason="OOMKilled"), Cause.OUT_OF_MEMORY),
        (Report(exit_code=-9, oom_kills=1, agent_cause="killed"), Cause.OUT_OF_MEMORY),
        (Report(exit_code=0, oom_kills=1), Cause.SUCCEEDED),
        (Report(exit_code=139), Cause.CRASHED),
        (Report(exit_code=134, agent_cause="contact"), Cause.PEER_LOST),
        (Report(exit_code=1, agent_cause="contact"), Cause.PEER_LOST),
        (Report(exit_code=143), Cause.PREEMPTED),
        (Report(exit_code=137, agent_cause="error"), Cause.KILLED),
        (Report(agent_cause="error"), Cause.USER_ERROR),
        (Report(exit_code=137, agent_cause="error", node_ready=False), Cause.NODE_LOST),
        (Report(exit_code=137, conditions=("PreemptionByScheduler",)), Cause.PREEMPTED),
        (Report(exit_code=1, events=("NodeNotReady",)), Cause.USER_ERROR),
        (Report(exit_code=137, pod_reason="Evicted", oom_kills=1), Cause.EVICTED),
        (Report(conditions=("DeletionByTaintManager",)), Cause.NODE_LOST),
        (Report(node_ready=False), Cause.NODE_LOST),
        (Report(exit_code=69), Cause.HARDWARE),
        (Report(exit_code=1, agent_cause="hardware", oom_kills=1), Cause.HARDWARE),
        (Report(exit_code=1, agent_cause="unclear"), Cause.UNCLEAR_FAULT),
        (Report(container_reason="ErrImagePull"), Cause.LAUNCH_FAILED),
        (Report(events=("FailedMount",)), Cause.LAUNCH_FAILED),
        (Report(exit_code=74, conditions=("PreemptionByScheduler",), oom_kills=1), Cause.NOT_STORED),
        (Report(exit_code=75), Cause.QUORUM_MISSED),
        (Report(exit_code=75, agent_cause="no_teacher"), Cause.NO_TEACHER),
        (Report(exit_code=1, agent_cause="crashed"), Cause.CRASHED),
        (Report(), Cause.UNKNOWN),
        (Report(agent_cause="a word of tomorrow's agent"), Cause.UNKNOWN),
    ],
    ids=str,
)
def test_cause_of_an_end(report: TerminationReport, cause: TerminationCause) -> None:
    verdict = find_termination_cause(report)
    assert verdict.cause is cause, verdict.evidence
    assert verdict.evidence


def test_agents_words_are_understood() -> None:
    """The master does not import the agent, so the words are compared here."""
    for word in ExitCause:
        assert find_termination_cause(Report(exit_code=1, agent_cause=word.value)).cause is not Cause.UNKNOWN
    causes = {code: find_termination_cause(Report(exit_code=int(code))).cause for code in ExitCode}
    assert causes == {
        ExitCode.DONE: Cause.SUCCEEDED,
        ExitCode.FAILED: Cause.USER_ERROR,
        ExitCode.NOT_STORED: Cause.NOT_STORED,
        ExitCode.TRY_AGAIN: Cause.QUORUM_MISSED,
        ExitCode.OUT_OF_MEMORY: Cause.KILLED,  # by the code alone: the counter in its message tells
        ExitCode.FAULTY_NODE: Cause.HARDWARE,
    }


@settings(max_examples=50)
@given(st.sampled_from(TerminationCause))
def test_what_goes_on_for_ever(cause: TerminationCause) -> None:
    """Only what the cluster does to a job may repeat without end."""
    endless = decide_relaunch(cause, 10**9).action is not RelaunchAction.STOP
    by_cluster = {Cause.PREEMPTED, Cause.NODE_LOST, Cause.NO_TEACHER, Cause.QUORUM_MISSED}
    assert endless == (cause in {Cause.SUCCEEDED, *by_cluster})


@settings(max_examples=50)
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
    "text",
    [
        *("", "Traceback: a script wrote this", "{", "[]", "7", '{"cause": 7}', '{"exit_code": 1}'),
        *('{"cause": "err', "[" * 100_000, '{"cause": "x"} and more', "\ufffd\x00", "9" * 5000),
    ],
)
def test_other_text_is_only_a_message(text: str) -> None:
    assert parse_termination_message(text) == TerminationReport(message=text.strip())


@pytest.mark.parametrize("value", [None, "1", -1, 1.5, True, [1], 2**70])
def test_wrong_values_are_unknown(value: object) -> None:
    text = json.dumps({"cause": "killed", "exit_code": value, "oom_kills": value, "message": value})
    message = value if isinstance(value, str) else ""
    assert parse_termination_message(text) == TerminationReport(agent_cause="killed", message=message)
