"""docs/troubleshooting.md quotes messages that the source has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOLE = "\0"  # a value in a message


def texts(node: ast.AST) -> Iterator[str]:
    """Yield the strings below a node, except docstrings, with `HOLE` in the place of values."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield re.sub(r"%(?:\.\d)?[a-z]", HOLE, node.value)
    elif isinstance(node, ast.JoinedStr):
        yield "".join(text for part in node.values for text in texts(part))
    elif isinstance(node, ast.FormattedValue):
        yield HOLE
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


def test_quoted_messages_exist() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    files = (path for folder in ("edl", "serving/edl_serving") for path in (ROOT / folder).rglob("*.py"))
    said = [text for path in files for text in texts(ast.parse(path.read_text()))]
    missing = []
    for message in quoted:
        pattern = re.compile(f"[^{HOLE}]*{HOLE}[^{HOLE}]*".join(map(re.escape, message.split("…"))))
        if not any(pattern.search(text) for text in said):
            missing.append(message)
    assert len(quoted) >= 20
    assert not missing, f"docs/troubleshooting.md quotes what no message says any more: {missing}"
