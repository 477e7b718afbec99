"""Which instances, keys and values a registry or store takes, and what it makes of those that others put there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edl.discovery import Instance
from edl.discovery.records import MAX_META, Rejected, from_json, to_json, validated
from edl.discovery.store import check_key, check_prefix
from edl.errors import SettingsError

GOOD = Instance("digits", "a", "127.0.0.1", 9000)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("{}", "address"),
        ('{"address": "h", "port": "80"}', "port '80' is not"),
        ('{"address": "h", "port": 65536}', "port 65536 is not"),
        ('{"address": "h", "port": 0}', "port 0 does not match"),
        ('{"address": "h", "port": 1, "capacity": "banana"}', "capacity 'banana' is not a number"),
        ('{"address": "h", "port": 1, "capacity": -2}', "capacity -2.0 is not"),
        ('{"address": "h", "port": 1, "capacity": 1' + "0" * 400 + "}", "capacity inf is not"),
        ('{"address": "h", "port": 1, "tags": "fast"}', "tags 'fast' are not a list"),
        ('{"address": "h", "port": 1, "meta": {"model": "x"}}', "meta key 'model'"),
        ('{"address": "h\\u001b[2J", "port": 1}', "printable"),
    ],
)
def test_the_reason_names_the_value(text: str, reason: str) -> None:
    found = from_json("digits", "a", text)
    assert isinstance(found, Rejected)
    assert reason in found.reason


def test_harmful_name_is_shown_harmless() -> None:
    evil = "evil\x1b[2J"
    for name, text in ((evil, '{"address": "h", "port": 1}'), ("a", to_json(replace(GOOD, id=evil)))):
        found = from_json("digits", name, text)
        assert isinstance(found, Rejected)
        assert found.id.isprintable()


@pytest.mark.parametrize(
    "changes",
    [
        {"service": "a b"},
        {"id": ""},
        {"address": ""},
        {"address": "unix:/x"},
        {"model": "\0"},
        {"tags": ("a", 1)},
        {"meta": {"a b": "x"}},
        {"meta": {"edl-id": "x"}},
        {"meta": {"a": "ü" * 300}},
        {"meta": {f"k{number}": "" for number in range(MAX_META + 1)}},
    ],
)
def test_impossible_instance_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        validated(replace(GOOD, **changes))


def test_keys_and_prefixes_that_will_do() -> None:
    for key in ("a", "a/b ü ?#%", "x" * 512, "..a"):
        assert check_key(key) == key
    for key in ("", "/a", "a/", "a//b", ".", "a/../b", "a\nb", "x" * 513):
        with pytest.raises(SettingsError, match="key"):
            check_key(key)
    for prefix in ("", "a", "a/", "a/.", "a/b"):
        assert check_prefix(prefix) == prefix
    for prefix in ("/", "a//", "../a"):
        with pytest.raises(SettingsError, match="prefix"):
            check_prefix(prefix)
