"""Names of member pods: DNS-1123 labels, all different."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from edl.master.kube.members.naming import build_member_name, shorten_name

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,120}[a-z0-9])?", fullmatch=True)


def test_short_names_stay() -> None:
    assert build_member_name("digits", "worker", 3, 0) == "digits-worker-3-0"
    assert build_member_name("a.b", "worker", 3, 0).startswith("a-b-"), "a dot would make the host name end there"


@given(NAMES, st.sampled_from(["worker", "teacher", "master"]), st.integers(0, 10**6), st.integers(0, 10**9))
def test_names_are_labels(name: str, role: str, index: int, try_number: int) -> None:
    built = build_member_name(name, role, index, try_number)
    assert len(built) <= 63
    assert LABEL.fullmatch(built)


@given(NAMES, NAMES)
def test_cut_names_differ(first: str, second: str) -> None:
    assert (shorten_name(first, 30) == shorten_name(second, 30)) == (first == second)


def test_long_names_differ_at_their_ends() -> None:
    long = "n" * 62
    assert shorten_name(f"{long}a", 40) != shorten_name(f"{long}b", 40)
    assert len(shorten_name(long, 63)) == 62
