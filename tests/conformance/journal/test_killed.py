"""SIGKILL at random moments of a process that writes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time

from tests.conformance.journal.places import Place
from tests.conformance.journal.processes import count
from tests.plugins_consul import ROOT

KILLS = 4


def test_killed_writer_loses_nothing(place: Place) -> None:
    """What was answered is there, and what is there is whole; a few times over the same journal."""
    choice = random.Random()
    answered = 0
    for kill in range(KILLS):
        command = [sys.executable, "-m", "tests.conformance.journal.processes", place.url, place.store_url, str(kill)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
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
