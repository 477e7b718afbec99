"""The fast tier has no time and no servers in it, and no other tier waits for a time that passes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
CLOCKS = {
    *(f"time.{name}{unit}" for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
      for unit in ("", "_ns")),
    *(f"time.{name}" for name in ("sleep", "localtime", "gmtime", "ctime", "strftime")),
    "asyncio.sleep", "timeit.default_timer", "datetime.date.today",
    *(f"datetime.datetime.{name}" for name in ("now", "utcnow", "today")),
}  # fmt: skip
SWITCH = "sleep(0)"  # asyncio's: lets other tasks run, and waits for nothing
REAL_SERVER = TESTS / "fast" / "dashboard" / "server" / "__init__.py"
"""The dashboard that it starts compares records with the clock of the machine, so that they have that time."""
SERVERS = {
    **dict.fromkeys(("consul_agent", "etcd_server", "triton", "vllm", "slurm", "browser"), "services"),
    **dict.fromkeys(("namespace", "stoppable_nodes", "helm"), "kubernetes"),
}
"""Fixtures that start what is not a Python package, and the tier that has it."""


def calls_of_clocks(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each use of a clock or a sleep, however it was imported."""
    known: dict[str, str] = {}  # a name here -> what it is
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {(alias.asname or alias.name): alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            known |= {(alias.asname or alias.name): f"{node.module}.{alias.name}" for alias in node.names}
            if any(alias.name == "*" for alias in node.names):
                yield node.lineno, f"from {node.module} import *"
    allowed = {
        id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node).endswith(SWITCH)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and id(node) not in allowed:
            first, dot, others = ast.unparse(node).partition(".")
            name = known.get(first, "") + dot + others
            if name in CLOCKS:
                yield node.lineno, name
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.endswith("_loop().time") or (called.endswith("Event().wait") and node.args):
                yield node.lineno, ast.unparse(node)


def sources(tier: str) -> list[Path]:
    return sorted((TESTS / tier).rglob("*.py"))


def test_fast_tests_read_no_clock() -> None:
    """Wait with `tests.waiting.wait_until`, inject a clock, and leave speed to benchmarks/."""
    found = [
        f"{path.relative_to(TESTS)}:{line}: {name}"
        for path in sources("fast")
        for line, name in calls_of_clocks(ast.parse(path.read_text()))
        if path != REAL_SERVER
    ]
    assert not found, "\n".join(found)


def test_no_test_sleeps() -> None:
    """What another process does is waited for with `tests.waiting.wait_until`."""
    found = [
        f"{path.relative_to(TESTS)}:{line}: {name}"
        for tier in ("services", "jobs", "kubernetes")
        for path in sources(tier)
        if path.name.startswith("test_")
        for line, name in calls_of_clocks(ast.parse(path.read_text()))
        if "sleep" in name
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


def test_fast_tests_need_no_server() -> None:
    """A test that needs a server lies in the tier that has it."""
    found = [
        f"{path.relative_to(TESTS)}:{node.lineno}: {argument.arg} belongs in tests/{SERVERS[argument.arg]}"
        for path in sources("fast")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        for argument in node.args.args
        if argument.arg in SERVERS
    ]
    assert not found, "\n".join(found)
