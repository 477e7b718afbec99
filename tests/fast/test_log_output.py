"""Log lines of a command on standard error, and foreign text in them: one line, printable and short."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.log_output import plain_log_to_stderr
from edl.quoting import quote, shown


@pytest.fixture
def loggers() -> Iterator[tuple[logging.Logger, logging.Logger]]:
    """One whose lines are wanted, and one of another library that a user has set to INFO."""
    wanted, other = logging.getLogger("edl.wanted.part"), logging.getLogger("library")
    other.setLevel(logging.INFO)
    yield wanted, other
    other.setLevel(logging.NOTSET)


def test_people_see_what_is_meant_for_them(
    loggers: tuple[logging.Logger, logging.Logger], capsys: pytest.CaptureFixture[str]
) -> None:
    wanted, other = loggers
    with plain_log_to_stderr("edl run", ["edl.wanted"]):
        wanted.info("generation %d", 3, extra={"generation": 3})
        wanted.debug("a detail")
        other.info("of torch, with LOGLEVEL=INFO")
        other.warning("it does not work")
        logging.getLogger("edl.wanted_too").info("of a logger whose name begins alike")
    wanted.info("after the block")
    assert capsys.readouterr().err == "edl run: generation 3\nedl run: it does not work\n"
    assert logging.getLogger("edl.wanted").level == logging.NOTSET


def test_closed_terminal_ends_nothing(
    loggers: tuple[logging.Logger, logging.Logger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node goes on when the terminal that it was started from has gone."""

    class Closed:
        def write(self, text: str) -> None:
            raise OSError(5, "Input/output error")

        def flush(self) -> None: ...

    monkeypatch.setattr("sys.stderr", Closed())
    with plain_log_to_stderr("edl run", ["edl.wanted"]):
        loggers[0].info("generation 3")


NASTY = "ok\r\n12:00 ERROR all lost\x1b[2J\x1b]0;title\x07\0\u202egnp.exe\u2028\x85\ud800"


def test_escapes_and_breaks_are_written_out() -> None:
    assert shown(NASTY) == (r"ok\r\n12:00 ERROR all lost\x1b[2J\x1b]0;title\x07\x00\u202egnp.exe\u2028\x85\ud800"), (
        "a reader sees what was sent, and a terminal does nothing"
    )
    assert shown("Größe 模型 ok") == "Größe 模型 ok", "letters stay"


@settings(deadline=None)
@given(st.text() | st.binary() | st.integers(), st.integers(10, 200))
def test_whatever_it_was_it_is_fit(value: object, limit: int) -> None:
    for words in (shown(value, limit), quote(value, limit)):
        assert words.isprintable()
        assert len(words) <= 2 * limit + 10
