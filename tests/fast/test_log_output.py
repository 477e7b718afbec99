"""Log lines of a command on standard error."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from edl.log_output import plain_log_to_stderr


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
