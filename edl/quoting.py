"""Makes foreign text, such as a teacher's message or a registry's names, safe for a log, an error or a terminal.

Such text could be megabytes long, imitate one of EDL's log lines, or move a terminal's cursor.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Iterable

MOST_CHARS = 500
"""Maximum number of characters of foreign text in a message: a teacher's reason with its model's error fits; a page of
HTML does not."""
_MOST_VALUE = 120
"""Maximum number of characters of a value in a message: a shape, name or path fits."""
_MOST_LISTED = 10
"""Maximum number of words listed in a message: enough to recognize the list."""
_MOST_MEANT = 3
"""Maximum number of suggestions for a mistyped name: more would hide the likely one."""


def clip(text: str, limit: int) -> str:
    """Leave out the middle of `text` if it is longer than `limit`."""
    if len(text) <= limit:
        return text
    return f"{text[: limit * 2 // 3]} ... {text[-limit // 4 :]}"


def shown(text: object, limit: int = MOST_CHARS) -> str:
    """Clip text, and escape what a log line must not contain (line breaks, terminal escapes) as `repr` does."""
    words = clip(text if isinstance(text, str) else str(text), limit)
    if words.isprintable():
        return words
    escaped = "".join(char if char.isprintable() else repr(char)[1:-1] for char in words)
    return clip(escaped, 2 * limit)


def quote(value: object, limit: int = _MOST_VALUE) -> str:
    """Return the clipped `repr` of a foreign value."""
    if isinstance(value, (str, bytes)):
        value = value[: 8 * limit]  # before repr, which may be four times as long
    return clip(repr(value), limit)


def listed(words: Collection[str], most: int = _MOST_LISTED, separator: str = ", ") -> str:
    """Join the first few of several foreign words, and add how many more there are."""
    given = separator.join(shown(word) for word in itertools.islice(words, most))
    return given + (f"{separator}and {len(words) - most} more" if len(words) > most else "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the end of an error; empty if no known name is close. Ignores letter case.

    Names that continue `word` with a dash are close: Kubernetes' job `el` has the id `el-7051cb99` in its store.
    """
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=2, cutoff=0.6)
    longer = [name for name in by_lower if word and name.startswith(f"{word.lower()}-")]
    found = list(dict.fromkeys([*near, *longer]))[:_MOST_MEANT]
    return f"; did you mean {' or '.join(quote(by_lower[name]) for name in found)}?" if found else ""
