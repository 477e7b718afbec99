"""What every journal promises, also to a writer that is killed with SIGKILL or stands still at any moment."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from edl.errors import ClosedError, EDLError, LeaseLostError, ProtocolError
from edl.master.journal import Journal
from tests.fast.master.journal.conftest import Place
from tests.fast.master.journal.processes import count

ROOT = Path(__file__).parents[4]
KILLS = 2


def begun(place: Place, timeout_s: float = 5.0) -> Journal:
    journal = place.open(timeout_s)
    journal.begin_term()
    return journal


@pytest.mark.parametrize("sizes", [[1, 0, 2], [7] * 1000, [450_000], [189_988, 1, 1]])
def test_groups_come_back_as_they_were(place: Place, sizes: list[int]) -> None:
    choice = random.Random(str(sizes))
    records = [choice.randbytes(size) for size in sizes]
    journal = begun(place)
    journal.append([b"before"])
    journal.append([])
    journal.append(records)
    journal.append([b"behind"])
    expected = (None, [b"before", *records, b"behind"])
    assert journal.load() == expected
    assert begun(place).load() == expected


@pytest.mark.parametrize("size", [0, 400_000])
def test_snapshot_replaces_records(place: Place, size: int) -> None:
    states = [random.Random(number).randbytes(size) for number in range(3)]
    journal = begun(place)
    journal.snapshot(states[0])
    assert journal.load() == (states[0], [])
    journal.append([b"1", b"2"])
    assert journal.load() == (states[0], [b"1", b"2"])
    journal.snapshot(states[1])
    journal = begun(place)
    journal.append([b"behind"])
    assert begun(place).load() == (states[1], [b"behind"])
    journal = begun(place)
    journal.snapshot(states[2])
    journal.append([b"3"])
    assert begun(place).load() == (states[2], [b"3"])


def test_terms_grow_and_records_go_on(place: Place) -> None:
    expected: list[bytes] = []
    for term in range(1, 5):
        journal = place.open()
        for write in (lambda: journal.append([b"x"]), lambda: journal.snapshot(b"x")):  # noqa: B023 - called here
            with pytest.raises(LeaseLostError, match="no term was begun"):
                write()
        assert journal.begin_term() == term
        assert journal.load()[1] == expected
        for number in range(term):
            journal.append([b"%d %d" % (term, number)])
            expected.append(b"%d %d" % (term, number))
        journal.close()
        journal.close()
    for use in (journal.begin_term, journal.load, lambda: journal.append([b"x"]), lambda: journal.snapshot(b"x")):
        with pytest.raises(ClosedError):
            use()
    assert begun(place).load() == (None, expected)


def test_earlier_writer_is_fenced(place: Place) -> None:
    first = begun(place)
    first.append([b"first"])
    second = begun(place)
    for _ in range(2):
        for write in (lambda: first.append([b"late"]), lambda: first.snapshot(b"late")):
            with pytest.raises(LeaseLostError, match="term"):
                write()
        second.append([b"second"])
    second.snapshot(b"state")
    second.append([b"behind"])
    with pytest.raises(LeaseLostError, match="term"):
        first.append([b"late"])
    assert second.load() == begun(place).load() == (b"state", [b"behind"])
    first.begin_term()  # it may come back, with a new term
    first.append([b"again"])
    with pytest.raises(LeaseLostError, match="term"):
        second.append([b"late"])
    assert first.load() == (b"state", [b"behind", b"again"])


@pytest.mark.parametrize("what", ["record", "snapshot", "lost"])
def test_damage_is_found(place: Place, what: str) -> None:
    journal = begun(place)
    journal.append([b"old"])
    journal.snapshot(b"state")
    journal.append([b"one"])
    journal.append([b"two"])
    place.damage(what)
    with pytest.raises(ProtocolError, match=r"journal .*(damaged|missing)"):
        begun(place, timeout_s=0.3).load()


def test_forked_journal_is_refused(place: Place) -> None:
    """The child can do nothing with it, and harms nothing when it ends."""
    journal = begun(place)
    journal.append([b"parent"])
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        answers = []
        for use in (journal.begin_term, journal.load, lambda: journal.append([b"x"]), lambda: journal.snapshot(b"x")):
            try:
                use()
                answers.append("done")
            except EDLError as exc:
                answers.append(type(exc).__name__)
        journal.close()
        os.write(writing, " ".join(answers).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "ClosedError ClosedError ClosedError ClosedError"
    os.waitpid(child, 0)
    journal.append([b"still"])
    assert journal.load() == begun(place).load() == (None, [b"parent", b"still"])


def test_killed_writer_loses_nothing(place: Place) -> None:
    choice = random.Random(3)
    answered = 0
    for kill in range(KILLS):
        command = [sys.executable, "-m", "tests.fast.master.journal.processes", place.url, place.store_url, str(kill)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            try:
                line = process.stdout.readline().split()
                assert line, "it began"
                assert int(line[1]) >= answered
                for _ in range(choice.randint(1, 20)):
                    answered = int(process.stdout.readline().split()[1])
            finally:
                process.kill()
            for rest in process.stdout.read().splitlines():
                if rest.count(" ") == 1 and rest.split()[0] in ("group", "snapshot"):
                    answered = max(answered, int(rest.split()[1]))
        journal = begun(place)
        found = count(*journal.load())
        assert answered <= found <= answered + 1, "a group more may be there: it was not answered yet"
        answered = found
        journal.close()
    assert answered >= KILLS
