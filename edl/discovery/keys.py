"""Which keys and values every store can hold."""

from __future__ import annotations

from edl.errors import SettingsError

__all__ = ["MAX_VALUE_BYTES", "check_key", "check_prefix", "check_value"]

# Consul's transactions, which make compare-and-set atomic, take 512 KiB of JSON with the value in base64.
MAX_VALUE_BYTES = 256 * 1024
MAX_KEY_CHARS = 512
"""Consul's own limit on a key, kept everywhere so that a program that runs on one store runs on the others."""


def check_key(key: str) -> str:
    """`key`, if it is path-like: parts of printable characters with single slashes between them.

    Raises:
        SettingsError: it is not.
    """
    if not isinstance(key, str) or not key or any(part in ("", ".", "..") for part in key.split("/")):
        raise SettingsError(f"store key {key!r:.80}: expected parts separated by '/', none of them empty, '.' or '..'")
    return _check_text(key)


def check_prefix(prefix: str) -> str:
    """Return `prefix`, if keys can start with it; the empty prefix is the start of all keys.

    Raises:
        SettingsError: it cannot.
    """
    whole_parts = prefix.split("/")[:-1] if isinstance(prefix, str) else [""]
    if any(part in ("", ".", "..") for part in whole_parts):
        raise SettingsError(f"store prefix {prefix!r:.80}: no key can start like this")
    return _check_text(prefix)


def check_value(value: bytes) -> bytes:
    """`value`, if it is small enough.

    Raises:
        SettingsError: it is not, or not bytes.
    """
    if not isinstance(value, bytes):
        raise SettingsError(f"a store value must be bytes, not {type(value).__name__}")
    if len(value) > MAX_VALUE_BYTES:
        raise SettingsError(f"a store value has at most {MAX_VALUE_BYTES:,} bytes, not {len(value):,}")
    return value


def _check_text(text: str) -> str:
    if not text.isprintable() or len(text) > MAX_KEY_CHARS:
        raise SettingsError(f"store key {text!r:.80}: at most {MAX_KEY_CHARS} printable characters are possible")
    return text
