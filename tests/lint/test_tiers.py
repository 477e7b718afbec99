"""The fast tier has no time in it, no other tier waits for a time that passes, and each test is in a tier."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
CLOCK = re.compile(
    r"time\.((time|monotonic|perf_counter|process_time|thread_time)(_ns)?|sleep|localtime|gmtime|ctime|strftime)"
    r"|timeit\..*|(datetime\.)?(datetime|date)\.(now|utcnow|today)"
)
REAL_SERVER = TESTS / "fast" / "dashboard" / "server" / "__init__.py"
"""The dashboard that it starts compares records with the clock of the machine, so that they have that time."""


def uses_of_clocks(path: Path) -> Iterator[str]:
    """Yield the place and the name of each use of a clock or a sleep."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "timeit"):
            name = f"from {node.module} import"  # its functions would have names that nobody looks for
        elif isinstance(node, ast.Attribute) and CLOCK.fullmatch(ast.unparse(node)):
            name = ast.unparse(node)
        elif isinstance(node, ast.Call) and re.fullmatch(r"asyncio\.sleep\((?!0\)).*", ast.unparse(node)):
            name = "asyncio.sleep"
        else:
            continue
        yield f"{path.relative_to(TESTS)}:{node.lineno}: {name}"


def sources(tier: str) -> list[Path]:
    return sorted((TESTS / tier).rglob("*.py"))


def test_fast_tests_read_no_clock() -> None:
    """Wait with `tests.waiting.wait_until`, inject a clock, and leave speed to benchmarks/."""
    found = [use for path in sources("fast") if path != REAL_SERVER for use in uses_of_clocks(path)]
    assert not found, "\n".join(found)


def test_no_test_sleeps() -> None:
    """What another process does is waited for with `tests.waiting.wait_until`."""
    found = [
        use
        for tier in ("services", "jobs", "kubernetes")
        for path in sources(tier)
        if path.name.startswith("test_")
        for use in uses_of_clocks(path)
        if use.endswith("sleep")
    ]
    assert not found, "\n".join(found)


def test_each_test_is_in_a_tier() -> None:
    """What lies elsewhere, or has another name, is run by nobody."""
    tiers = [TESTS / name for name in ("fast", "services", "jobs", "kubernetes", "lint", "gpu", "soak")]
    found = [
        f"{path.relative_to(TESTS)}:{node.lineno}: {node.name}"
        for path in TESTS.rglob("*.py")
        if not (path.name.startswith("test_") and any(path.is_relative_to(tier) for tier in tiers))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert not found, "\n".join(found)
