"""The fast tier has no time and no servers in it, and no other tier waits for a time that passes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "monotonic_ns", "time_ns", "perf_counter_ns", "sleep"}
SWITCH = "asyncio.sleep(0)"  # lets other tasks run, and waits for nothing
SERVERS = {
    **dict.fromkeys(("consul_agent", "etcd_server", "triton", "vllm", "slurm", "browser"), "services"),
    **dict.fromkeys(("namespace", "stoppable_nodes", "helm"), "kubernetes"),
}
"""Fixtures that start what is not a Python package, and the tier that has it."""


def calls_of_clocks(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each use of `time.NAME`, and of `asyncio.sleep` for longer than 0."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from ((node.lineno, f"from time import {alias.name}") for alias in node.names if alias.name in CLOCKS)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "time" and node.attr in CLOCKS:
            yield node.lineno, f"time.{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "asyncio.sleep" and ast.unparse(node) != SWITCH:
            yield node.lineno, ast.unparse(node)


def sources(tier: str) -> list[Path]:
    return sorted((TESTS / tier).rglob("*.py"))


def test_fast_tests_read_no_clock() -> None:
    """Wait with `tests.waiting.wait_until`, inject a clock, and leave speed to benchmarks/."""
    found = [
        f"{path.relative_to(TESTS)}:{line}: {name}"
        for path in sources("fast")
        for line, name in calls_of_clocks(ast.parse(path.read_text()))
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
