"""SIGKILL at random moments of a process that writes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time

from edl.errors import JournalError
from edl.master.journal import Journal
from tests.fast.master.journal.places import Place
from tests.fast.master.journal.processes import count
from tests.plugins_consul import ROOT

KILLS = 4


def start(place: Place, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.fast.master.journal.processes", place.url, place.store_url, str(seed)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_killed_writer_loses_nothing(place: Place) -> None:
    """What was answered is there, and what is there is whole; a few times over the same journal."""
    choice = random.Random()
    answered = 0
    for kill in range(KILLS):
        with start(place, kill) as process:
            assert process.stdout is not None
            try:
                line = process.stdout.readline().split()
                assert line, "it began"
                assert int(line[1]) >= answered
                line = process.stdout.readline().split()
                assert line, "it wrote something"
                answered = int(line[1])
                time.sleep(choice.uniform(0.0, 0.3))
            finally:
                process.send_signal(signal.SIGKILL)
            for rest in process.stdout.read().splitlines():
                if rest.count(" ") == 1 and rest.split()[0] in ("group", "snapshot"):
                    answered = max(answered, int(rest.split()[1]))
        journal = place.open()
        journal.begin_term()
        found = count(*journal.load())
        assert answered <= found <= answered + 1, "a group more may be there: it was not answered yet"
        answered = found
        journal.close()
    assert answered >= KILLS


def begin_while_it_stands(place: Place, process: subprocess.Popen[str]) -> Journal:
    """Begin a term while a writer stands still; one that holds its file goes on for a while, and stands still again."""
    for _ in range(50):
        process.send_signal(signal.SIGSTOP)
        try:
            journal = place.open(timeout_s=0.2)
            journal.begin_term()
            return journal
        except JournalError as exc:
            if not exc.busy:
                raise
            process.send_signal(signal.SIGCONT)
            time.sleep(random.uniform(0.0, 0.05))
    raise AssertionError("it always holds its file")


def test_paused_writer_is_fenced(place: Place) -> None:
    """A master that stood still while another took over: nothing of what it does then is there, or answered."""
    with start(place, 1) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("begun")
            assert process.stdout.readline()
            journal = begin_while_it_stands(place, process)
            found = count(*journal.load())
            process.send_signal(signal.SIGCONT)
            state = b"%d taken over" % found
            journal.snapshot(state)
            lines = process.stdout.read().splitlines()  # until it ends
            assert lines[-1] == "fenced"
            answered = [int(line.split()[1]) for line in lines[:-1] if line.startswith("group")]
            assert max(answered, default=0) <= found
            assert journal.load() == (state, [])
        finally:
            process.send_signal(signal.SIGKILL)
