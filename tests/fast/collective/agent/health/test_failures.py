"""What it means that workers ended, or hang, and what follows. The texts are torch 2.13's own, or NCCL's."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl import cgroups
from edl.collective.agent.ending import TerminationMessage, cut_middle, write_termination_message
from edl.collective.agent.health.failures import (
    HANGING,
    ExitCause,
    GenerationOutcome,
    Progress,
    RecoveryDecision,
    RestartPolicy,
    WorkerFailure,
    decide_recovery,
    find_exit_cause,
)
from edl.collective.agent.health.hangs import (
    ActivityMonitor,
    HangDetector,
    HangLimits,
    ProcessUsage,
    ThreadUsage,
    describe_hang,
    find_progress_limit,
    is_active,
    read_usage,
)
from edl.collective.agent.processes import zygote
from edl.collective.agent.worker_group import Heartbeat
from edl.collective.worker_status import Phase, WorkerStatus, WorkerStatusPage
from tests.waiting import wait_until

PAIR = "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]"
CONTACT = [
    f"{PAIR} Connection closed by peer [127.0.0.1]:10126. This is typically caused by a remote worker crashing. Check"
    " the logs of the remote worker before reporting an error. GLHF! 🏖️",
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting"
    " 3000ms for recv operation to complete",
    "torch.distributed.DistStoreError: Timed out after 4 seconds waiting for clients. 1/2 clients joined.",
    "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote"
    " server shutdown or crash?",
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote"
    " process exited or there was a network error, NCCL version 2.19.3\nncclRemoteError: A call failed possibly due to"
    " a network error or a remote process exiting prematurely.",
    "RuntimeError: NCCL communicator was aborted on rank 1.",
]
ERROR = [
    "",
    "LookupError: the user's own mistake",
    "ConnectionRefusedError: [Errno 111] Connection refused",
    "TimeoutError: Timed out waiting for the tokenizer",
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "MyError: DataLoader worker (pid 123) is killed by signal: Killed. ",
    "MyError: see DistStoreError in the docs",
]

# As torch raises it in the main process: at once, or after it has noticed that the worker is gone.
READER_KILLED = "RuntimeError: DataLoader worker (pid 123) is killed by signal: Killed. "
READER_GONE = "RuntimeError: DataLoader worker (pid(s) 123, 124) exited unexpectedly"
READER_FAILED = (
    "RuntimeError: DataLoader worker (pid 123) exited unexpectedly with exit code 3. Details are lost due to"
    " multiprocessing. Rerunning with num_workers=0 may give better error trace."
)
HANDLING = "\nDuring handling of the above exception, another exception occurred:\n\n"
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"


def traceback_of(last: str) -> str:
    return f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\n{last}\n'


@pytest.mark.parametrize("text", CONTACT)
def test_lost_peer_is_not_the_scripts_error(text: str) -> None:
    for shown in (text, traceback_of(text), traceback_of(text) + CAUSE + traceback_of("OSError: step 3")):
        assert find_exit_cause(1, shown) is ExitCause.PEER_LOST


@pytest.mark.parametrize("text", ERROR)
def test_the_scripts_own_errors_are_its_own(text: str) -> None:
    assert find_exit_cause(1, text) is find_exit_cause(1, traceback_of(text)) is ExitCause.ERROR
    assert find_exit_cause(-9, text) is ExitCause.KILLED


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE"])
def test_crash_is_no_kill(name: str) -> None:
    """The workers are restarted in place, and if that does not help, the job's end names a crash."""
    crashed = failure(-signal.Signals[name])
    policy, decision = RestartPolicy(0), decide([crashed, LOST], 0.0)
    assert (decision.restart, decision.cause) == ("worker 0", ExitCause.CRASHED)
    for _ in range(11):
        assert policy.apply_limits(decision, 0, Progress(5)) == decision
        policy.record_restart(Progress(5), 1.0)
    end = policy.apply_limits(decision, 0, Progress(5))
    assert (bool(end.fatal), end.cause) == (True, ExitCause.CRASHED)


def test_abort_is_a_crash_of_a_single_rank() -> None:
    """Of several ranks, NCCL's watchdog and gloo abort a rank that lost contact with another."""
    assert decide([ABORTED], 2.5).cause is ExitCause.PEER_LOST
    assert decide([replace(ABORTED, alone=True)], 0.0).cause is ExitCause.CRASHED


NO_TEACHER = "edl.errors.NoTeacherError: no live teacher for 'digits' in edl://h:1 within 60 s (none is registered)"


def test_missing_teacher_is_no_user_error() -> None:
    """Also if the script raised another error because of it."""
    for text in (traceback_of(NO_TEACHER), traceback_of(NO_TEACHER) + CAUSE + traceback_of("OSError: step 3")):
        waited = failure(1, text, rank=5)
        assert decide([waited], 0.4) == RecoveryDecision()
        decision = decide([LOST, failure(3), waited], 0.5)
        assert (decision.cause, decision.rank) == (ExitCause.NO_TEACHER, 5)
        assert re.search("'digits' in .* within 60 s .*minReplicas.*teacher_timeout_s", decision.fatal.split("\n")[-1])
        assert decide([waited, WRONG], 0.5).cause is ExitCause.ERROR
    mistake = traceback_of(NO_TEACHER) + HANDLING + traceback_of("NameError: name 'fallback' is not defined")
    assert find_exit_cause(1, mistake) is ExitCause.ERROR


def test_killed_loader_is_a_killed_worker() -> None:
    killed, gone = traceback_of(READER_KILLED), traceback_of(READER_GONE)
    for text in (killed, killed + CAUSE + gone):
        assert find_exit_cause(1, text) is ExitCause.KILLED
        assert decide([failure(1, text, rank=5)], 0.0).restart == f"rank 5: {text.rstrip().splitlines()[-1].strip()}"
    failed, wrong = traceback_of(READER_FAILED), traceback_of("ValueError: no data")
    for text in (failed, failed + CAUSE + gone, killed + CAUSE + wrong, gone, wrong + CAUSE + gone):
        assert find_exit_cause(1, text) is ExitCause.ERROR, "its own end is the script's error"


def decide(failures: list[WorkerFailure], waited_s: float, **known: Any) -> RecoveryDecision:
    """Decide, with an empty decision for none yet."""
    found = decide_recovery(failures, waited_s, error_grace_s=0.5, contact_timeout_s=2.0, **known)
    return found or RecoveryDecision()


def failure(status: int, text: str = "", rank: int = 0) -> WorkerFailure:
    return WorkerFailure(rank, status, text, f"worker {rank}")


KILLED = failure(-signal.SIGKILL, rank=1)
ABORTED = failure(-signal.SIGABRT, rank=2)
LOST = failure(1, CONTACT[0], rank=3)
WRONG = failure(1, ERROR[1], rank=4)


@pytest.mark.parametrize(
    ("failures", "waited_s", "outcome"),
    [
        ([], 9.0, None),
        ([KILLED], 0.0, "restart"),
        ([LOST, KILLED], 0.0, "restart"),
        ([WRONG, KILLED], 9.0, "restart"),
        ([ABORTED], 2.4, None),
        ([ABORTED], 2.5, "restart"),
        ([WRONG, ABORTED], 0.0, None),
        ([WRONG, ABORTED], 1.0, "fatal"),
        ([ABORTED, WRONG, KILLED], 0.0, "restart"),
        ([WRONG], 0.4, None),
        ([WRONG], 0.5, "fatal"),
        ([LOST, WRONG], 0.5, "fatal"),
        ([failure(3)], 1.9, None),
        ([failure(3)], 2.0, "fatal"),
        ([LOST], 2.4, None),  # its peer may have ended with an exit code, and says so first
        ([LOST], 2.5, "restart"),
    ],
)
def test_what_follows(failures: list[WorkerFailure], waited_s: float, outcome: str | None) -> None:
    verdict = decide(failures, waited_s)
    assert (bool(verdict.restart), bool(verdict.fatal)) == (outcome == "restart", outcome == "fatal")


def test_exit_code_while_a_node_is_missing() -> None:
    """However late this agent has its turn: the script may have ended itself because of that node."""
    silent = failure(3)
    assert decide([silent], 99.0).fatal
    assert decide([silent], 99.0, missing=True) == RecoveryDecision()
    for failures in ([WRONG], [silent, WRONG], [WRONG, silent]):
        verdict = decide(failures, 0.5, missing=True)
        assert verdict.fatal == "worker 4\nLookupError: the user's own mistake", "an error is one"


def test_early_rank_is_a_likely_cause() -> None:
    lost = "rank 3 lost contact with another rank"
    for ended, ranks in (([1], "rank 1"), (range(9, 4, -1), "ranks 5, 6, 7, 8 and 1 more")):
        assert decide([LOST], 2.5, ended=ended).restart.startswith(f"{lost}, perhaps because")
        assert f" ended on {ranks}: " in decide([LOST], 2.5, ended=ended).restart
    assert decide([LOST], 2.5, ended=[1], missing=True).restart == lost, "it is not where something else is"
    assert decide([LOST, ABORTED], 2.5, ended=[1]).restart == lost
    assert decide([LOST], 2.5).traceback == LOST.text, "there is no other cause to show"


def test_lost_contact_is_a_consequence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where `init_process_group` has wrapped the hook, as this does; one of the script's own is called."""
    usual = sys.__excepthook__
    for module in ("train", "torch.distributed.distributed_c10d"):
        wrapped: Any = lambda *failure: usual(*failure)  # noqa: E731
        wrapped.__module__ = module
        monkeypatch.setattr(sys, "excepthook", wrapped)
        with pytest.raises(SystemExit):
            zygote._end_by_exception(RuntimeError(CONTACT[0]))
        error = capsys.readouterr().err
        assert "as a consequence: " in error.splitlines()[0]
        assert ("GLHF" in error) == (module == "train")


KILLED_0 = RecoveryDecision(restart="worker 0 was killed")


@pytest.mark.parametrize(("step", "lived_s"), [(6, 1.0), (5, 61.0)])
def test_fruitless_restarts_end_the_job(step: int, lived_s: float) -> None:
    policy = RestartPolicy(0)
    for _ in range(11):
        assert policy.apply_limits(KILLED_0, 0, Progress(5)) == KILLED_0
        policy.record_restart(Progress(5), 1.0)
    nowhere = policy.apply_limits(KILLED_0, 0, Progress(5))
    fatal = "10 restarts in a row made no progress; the last because worker 0 was killed"
    assert nowhere == RecoveryDecision(fatal=fatal)
    assert policy.apply_limits(KILLED_0, 0, Progress(6)) == KILLED_0, "this one led somewhere"
    policy.record_restart(Progress(step), lived_s)
    for _ in range(10):
        assert policy.apply_limits(KILLED_0, 0, Progress(step)) == KILLED_0
        policy.record_restart(Progress(step), 1.0)
    assert policy.apply_limits(KILLED_0, 0, Progress(step)).fatal


def test_regular_hangs_end_the_job() -> None:
    """An evaluation after each epoch of 100 steps is killed, and left out; a hang now and then is something else."""
    hang = RecoveryDecision(restart=f"{HANGING}: rank 0, no step", cause=ExitCause.KILLED)
    for steps in ([99, 99, 199], [100, 200], [31, 100, 200, 300], [99, 156, 200, 244]):
        policy = RestartPolicy(0)
        for step in steps[:-1]:
            assert policy.apply_limits(hang, 0, Progress(step)) == hang
            policy.record_restart(Progress(step), 1.0, hung=True)
        found = policy.apply_limits(hang, 0, Progress(steps[-1]))
        assert found.cause is ExitCause.ERROR
        assert re.search("every (100|44) steps.*--hang-after", found.fatal)
    policy.record_restart(Progress(99, 500), 1.0, hung=True)
    assert policy.apply_limits(hang, 0, Progress(99, 500)) == hang, "it did not get as far"
    assert "again after the same step" in policy.apply_limits(hang, 0, Progress(99, 501)).fatal


def outcome_of(folder: Path, status: int, rank: int = 0, leave_on_oom: bool = False) -> GenerationOutcome:
    made = GenerationOutcome(1.5, 0, leave_on_oom=leave_on_oom)
    made.begin_generation(0.0)
    made.record_exit(rank, status, f"worker 0 ended with exit code {status}", folder / "error.json")
    return made


def test_old_records_excuse_an_exit_code(tmp_path: Path) -> None:
    """A machine stood still after the records were read: since then the lease of a lost node may have ended."""
    outcome = outcome_of(tmp_path, 3)
    outcome._failed_at -= 100.0
    read_at = outcome._failed_at + 1.0
    assert outcome.decide_recovery(0, (), missing=False, trained=True, progress=Progress(0), known_at=read_at) is None
    decision = outcome.decide_recovery(
        0, (), missing=False, trained=True, progress=Progress(0), known_at=read_at + 50.0
    )
    assert "exit code 3" in decision.fatal


DATA_LOADER = "RuntimeError: DataLoader worker (pid 71) is killed by signal: Killed."


@pytest.mark.parametrize(
    ("kills", "status", "text", "leaves"),
    [
        (1, -signal.SIGKILL, "", True),
        (0, -signal.SIGKILL, "", False),
        (None, -signal.SIGKILL, "", False),
        (1, 1, DATA_LOADER, True),
        (0, 1, DATA_LOADER, False),
    ],
)
def test_want_of_memory_may_end_a_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kills: int | None, status: int, text: str, leaves: bool
) -> None:
    counts = chain([5], repeat(None if kills is None else 5 + kills))
    monkeypatch.setattr(cgroups, "read_oom_kills", lambda: next(counts))
    (tmp_path / "error.json").write_text(json.dumps({"message": {"message": text}}))
    outcome = outcome_of(tmp_path, status, rank=3, leave_on_oom=True)
    decision = outcome.decide_recovery(0, (), missing=False, trained=True, progress=Progress(0))
    assert decision.needs_memory is leaves
    assert (decision.rank, decision.cause, decision.oom_kills) == (3, ExitCause.KILLED, kills)
    outcome.clear_generation()
    outcome.begin_generation(0.0)
    outcome.record_exit(3, -signal.SIGKILL, "killed", tmp_path / "error.json")
    again = outcome.decide_recovery(0, (), missing=False, trained=True, progress=Progress(0))
    assert not again.needs_memory, "that was the generation before"


MEGABYTE = 1 << 20
FIRST = "rank 3: worker 1 (process 77) ended with exit code 1"


def deep_traceback(exception: str, calls: int = 20_000) -> str:
    lines = [FIRST, "Traceback (most recent call last):"]
    for number in range(calls):
        lines += [f'  File "train.py", line {number}, in descend', f"    descend({number})"]
    return "\n".join([*lines, exception])


def decode(message: TerminationMessage) -> dict[str, object]:
    data = message.encode()
    assert len(data) <= 4096
    values = json.loads(data.decode("utf-8"))
    assert isinstance(values, dict)
    return values


def test_long_traceback_keeps_its_ends() -> None:
    """Also one of an exception with many words of its own, in characters of several bytes."""
    for words in ("the user's own mistake", "\x1b[0m" * MEGABYTE, "界" * MEGABYTE):
        text = deep_traceback(f"ValueError: {words} and so on")
        found = decode(TerminationMessage("error", 1, message=text))["message"]
        assert isinstance(found, str)
        assert found.startswith(FIRST)
        assert found.endswith(text[-100:])


@settings(max_examples=30)
@given(st.text(st.characters(), max_size=3000), st.text(max_size=400), st.integers(0, 4), st.integers(20, 400))
def test_any_text_fits(text: str, node: str, times: int, max_bytes: int) -> None:
    message = TerminationMessage("error", 255, 2**40, node, 2**62, text * times)
    found = decode(message)
    short = len(message.message) < 300
    assert not short or found == asdict(message), "a short text is kept whole"
    cut = cut_middle(text * times, max_bytes)
    assert len(json.dumps(cut, ensure_ascii=False).encode("utf-8", "replace")) - 2 <= max_bytes


def test_written_in_place(tmp_path: Path) -> None:
    """A container's file is a mount: it is the same file afterwards, and nothing of an older message is left."""
    path = tmp_path / "termination-log"
    path.write_text("x" * 10_000)
    number = path.stat().st_ino
    message = TerminationMessage("error", 1, 0, "host", 0, "ValueError")
    write_termination_message(str(path), message)
    assert path.read_bytes() == message.encode()
    assert path.stat().st_ino == number
    write_termination_message(os.devnull, message)
    write_termination_message("", message)


@pytest.mark.parametrize("name", ["", "no/such", "pipe", "/dev/full", "a\0b", "loop"])
def test_unwritable_log_is_only_logged(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with caplog.at_level(logging.WARNING):
        write_termination_message(str(tmp_path / name), TerminationMessage(message="x"))
    assert "EDL_TERMINATION_LOG" in caplog.text


LIMITS = HangLimits(floor_s=10.0, factor=5.0, first_step_s=60.0, start_s=30.0, load_s=40.0, save_s=20.0)


def status(phase: Phase = Phase.TRAIN, **fields: object) -> WorkerStatus:
    values = {"phase_since": 100.0, "step": 7, "step_at": 100.0, "durations_s": (1.0, 1.0, 1.0), **fields}
    return replace(WorkerStatusPage.from_env().read_status(), phase=phase, **values)


def why_hung(status: WorkerStatus, now_s: float, limits: HangLimits) -> str | None:
    found = find_progress_limit(status, limits, forked_s=0.0)
    return None if found is None else describe_hang(found, now_s, limits)


@pytest.mark.parametrize(
    ("one", "limit_s", "words"),
    [
        (status(step=-1, step_at=0.0), 60.0, "for the first steps"),
        (status(durations_s=(0.1, 0.1)), 60.0, "for the first steps"),
        (status(step_at=50.0, phase_since=105.0), 15.0, "no step after step 7"),  # since a save, or a new worker
        (status(Phase.START), 30.0, "in phase START"),
        (status(Phase.LOAD), 40.0, "in phase LOAD"),
        (status(Phase.SAVE), 20.0, "in phase SAVE"),
        (status(Phase.AGREE), 120.0, "in phase AGREE"),
    ],
)
def test_each_phase_has_its_limit(one: WorkerStatus, limit_s: float, words: str) -> None:
    assert why_hung(one, 100.0 + limit_s, LIMITS) is None
    assert words in (why_hung(one, 100.1 + limit_s, LIMITS) or "")


@pytest.mark.parametrize("limits", [HangLimits(floor_s=3600.0), HangLimits(), HangLimits(save_s=4000.0)])
@pytest.mark.parametrize("durations_s", [(), (200.0, 200.0, 200.0)])
@pytest.mark.parametrize("phase", [Phase.TRAIN, Phase.SAVE])
def test_hanging_rank_is_found_first(limits: HangLimits, durations_s: tuple[float, ...], phase: Phase) -> None:
    waiting, hanging = (status(each, durations_s=durations_s) for each in (Phase.AGREE, phase))
    found = next(now_s for now_s in range(100, 20000, 30) if why_hung(hanging, now_s, limits))
    assert why_hung(waiting, found, limits) is None
    assert why_hung(waiting, 20000.0, limits) is not None, "but not for ever"


def test_silent_and_waiting_scripts_are_left() -> None:
    for one in (status(Phase.START, step=-1), status(Phase.PAUSE), status(Phase.EXIT)):
        assert why_hung(one, 1e9, LIMITS) is None


WORKING = HangLimits(floor_s=10.0, factor=5.0, working_factor=4.0)


class Simulation:
    """Workers by local rank, which is their process id as well; those in `working` use a core."""

    def __init__(self, *working: int) -> None:
        self.working = set(working)
        self.now_s = 100.0
        self.statuses = {rank: status() for rank in (0, 1)}
        self.detector = HangDetector(WORKING, ActivityMonitor(self._usage))
        self.detector.begin_generation(0.0)

    def _usage(self, pid: int) -> ProcessUsage:
        used_s = self.now_s if pid in self.working else 0.0
        return ProcessUsage(self.now_s, {(pid, 1): ThreadUsage(used_s, 0)})

    def until_hung(self, end_s: float) -> tuple[float, int, str] | None:
        """When, who and why; None if nobody is found until `end_s`."""
        while self.now_s < end_s:
            self.now_s += 0.125  # exact in binary
            workers = {rank: (rank, one) for rank, one in self.statuses.items()}
            if (found := self.detector.find_hung(workers, self.now_s)) is not None:
                return round(self.now_s - 100.0, 1), *found
        return None


def test_a_worker_that_works_has_longer() -> None:
    simulation = Simulation(1)
    assert simulation.until_hung(139.0) is None, "rank 0 waits for rank 1"
    assert simulation.detector.busy
    found = simulation.until_hung(200.0)
    assert found[:2] == (40.1, 1)
    assert found[2].endswith("the limit is 40 s for steps that take 1 s for a process that works")


def test_a_worker_that_stops_working_hangs() -> None:
    simulation = Simulation(1)
    assert simulation.until_hung(130.0) is None
    simulation.working.clear()
    found = simulation.until_hung(200.0)
    assert 44.0 < found[0] < 45.5, "half a limit after it was seen to work last, and a limit for who waited for it"


def test_what_is_declared_has_its_own_limit() -> None:
    simulation = Simulation()
    simulation.statuses[0] = status(Phase.BUSY, busy_with="evaluation", busy_limit_s=500.0)
    assert simulation.until_hung(599.0) is None
    found = simulation.until_hung(700.0)
    assert found == (
        500.1, 0, "busy with evaluation for 500.1 s; the limit is 500 s that the script has set",
    )  # fmt: skip


def test_another_nodes_worker_is_waited_for() -> None:
    simulation = Simulation()
    simulation.detector.others_busy = True
    assert simulation.until_hung(300.0) is None
    assert not simulation.detector.busy, "or two nodes would excuse each other for ever"
    simulation.detector.others_busy = False
    assert simulation.until_hung(400.0) is not None


COMPUTE = "print('there', flush=True)\nwhile True: sum(range(1000))"
CHILD = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {COMPUTE!r}])"
READ = """
import threading
file, event = open("/dev/zero", "rb"), threading.Event()
print("there", flush=True)
while True: file.read(2**22); event.wait(0.05)
"""


@contextlib.contextmanager
def running(source: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "there\n"
        yield process.pid
    finally:
        for pid in sorted({key[0] for key in read_usage(process.pid).nbytes} - {process.pid}):
            subprocess.run(["kill", "-9", str(pid)], check=False)
        process.kill()
        process.communicate()


@pytest.mark.parametrize("source", [CHILD, READ], ids=["has a child that computes", "reads"])
def test_a_process_that_works_is_seen(source: str) -> None:
    with running(source) as pid:
        before = read_usage(pid)
        wait_until(lambda: is_active(before, read_usage(pid)), "it works")
        after = read_usage(pid)
        assert not is_active(after, replace(after, at_s=after.at_s + 1.0)), "and does nothing any more"
    gone = read_usage(pid)
    assert (gone.threads, gone.nbytes, is_active(gone, gone)) == ({}, {}, False)


def usage(at_s: float, cpu_s: float, calls: int, queued_s: float = 0.0, may_spin: bool = True) -> ProcessUsage:
    return ProcessUsage(at_s, {(1, 1): ThreadUsage(cpu_s, calls, queued_s)}, may_spin=may_spin)


@pytest.mark.parametrize(
    ("after", "works"),
    [
        (usage(10.0, 9.9, 2), False),  # a wait for a kernel of NCCL
        (usage(10.0, 9.9, 2, may_spin=False), True),  # without a device, CPU time counts
        (usage(10.0, 9.9, 1000), True),
        (usage(10.0, 0.2, 1000), False),  # a watchdog
        (usage(10.0, 0.2, 1000, queued_s=9.0), True),  # on a busy machine
        (usage(10.0, 0.05, 100, queued_s=9.9), False),
        (usage(10.0, 0.05, 5, may_spin=False), False),  # polls
    ],
)
def test_cpu_time_counts_beside_calls(after: ProcessUsage, works: bool) -> None:
    assert is_active(usage(0.0, 0.0, 0), after) is works


class Beats:
    """An agent's beats; its thread has ended, and turns are this class's to make."""

    def __init__(self) -> None:
        self.now_s, self.touch_s = 100.0, 0.0
        self.beats: list[float] = []
        self.touched = self.woken = 0
        self._heartbeat = Heartbeat(1.0, self.beats.append, self._touch, self._wake, clock=lambda: self.now_s)
        self._heartbeat.close()
        self.allow = self._heartbeat.allow_beats
        self.touched = 0

    def _touch(self) -> None:
        self.touched += 1
        self.now_s += self.touch_s

    def _wake(self) -> None:
        self.woken += 1

    def turn(self, after_s: float = 0.2) -> int:
        """Make a turn and return how many beats there were."""
        self.now_s += after_s
        self._heartbeat._turn()
        return len(self.beats)


def test_sign_of_life_while_records_allow() -> None:
    simulation = Beats()
    assert simulation.turn() == 0, "nobody has looked yet"
    simulation.allow(100.1, 101.0)
    assert [simulation.turn() for _ in range(5)] == [1, 2, 3, 3, 3]
    assert (simulation.touched, simulation.woken) == (6, 0)
    simulation.allow(101.1, math.inf)
    assert simulation.turn() == 4


def test_stopped_agent_looks_before_it_beats() -> None:
    simulation = Beats()
    simulation.allow(100.0, math.inf)
    assert simulation.turn(1.0) == 1, "late, and not stopped"
    assert simulation.turn(1.1) == 1
    assert (simulation.turn(), simulation.woken) == (1, 1)
    simulation.allow(102.0, math.inf)
    assert simulation.turn() == 1, "the records were asked for before the stop was over"
    simulation.allow(102.2, math.inf)
    assert simulation.turn() == 2


def test_stopped_turn_gives_an_old_sign() -> None:
    simulation = Beats()
    simulation.allow(100.0, math.inf)
    simulation.touch_s = 5.0
    simulation.turn()
    assert simulation.beats == [pytest.approx(100.2)]
