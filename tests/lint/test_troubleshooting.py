"""docs/troubleshooting.md quotes messages that the source has."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VALUE = re.compile(r"\{[^{}\n]*\}|%(?:\.\d)?[a-z]")
NEXT_LINE = re.compile(r"""["']\s*\n\s*f?["']""")  # where a string goes on in the next line


def test_quoted_messages_exist() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    files = (path for folder in ("edl", "serving/edl_serving") for path in (ROOT / folder).rglob("*.py"))
    said = "\n".join(VALUE.sub("…", NEXT_LINE.sub("", path.read_text())) for path in files)
    missing = [message for message in quoted if message not in said]
    assert len(quoted) >= 20
    assert not missing, f"docs/troubleshooting.md quotes what no message says any more: {missing}"
