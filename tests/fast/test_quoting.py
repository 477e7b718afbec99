"""Foreign text in a log is one line, printable and short, whatever it was."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from edl.quoting import listed, quote, shown

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


def test_many_names_are_counted() -> None:
    assert listed([f"t{number}" for number in range(200)], 2) == "t0, t1, and 198 more"
    assert listed(["a\nb"]) == r"a\nb"
    assert listed([]) == ""
