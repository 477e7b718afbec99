"""What discovery on Kubernetes costs the API server at rest: requests a second of teachers and students.

    python -m benchmarks.kubernetes_discovery --url kubernetes://NAMESPACE [--teachers 20 --students 10 --seconds 60]

Each teacher and student has a registry of its own, as a process of its own has. What they ask is counted where they
send it, so that others may use the cluster meanwhile.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import logging
import re
import time
import uuid
from collections.abc import Sequence
from typing import Final

from edl.discovery import Instance, open_registry

_REQUEST: Final = re.compile(r'"(\w+) (\S+) HTTP')
"""In the words of urllib3's log."""
_SETTLED_S: Final = 10.0
"""After which all have registered, and a single process removes leases that are over."""


class RequestCounter(logging.Handler):
    """Counts requests by method and kind of object."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.counts: collections.Counter[str] = collections.Counter()

    def emit(self, record: logging.LogRecord) -> None:
        match = _REQUEST.search(record.getMessage())
        if match is not None:
            method, path = match.groups()
            kind = "leases" if "/leases" in path else "configmaps"
            verb = "watch" if "watch=true" in path else {"GET": "get or list"}.get(method, method.lower())
            self.counts[f"{verb} {kind}"] += 1


def measure(url: str, teachers: int, students: int, seconds: float) -> collections.Counter[str]:
    """Requests of so many teachers and students at rest, in so many seconds."""
    service = f"bench-{uuid.uuid4().hex[:8]}"
    counter = RequestCounter()
    log = logging.getLogger("urllib3.connectionpool")
    with contextlib.ExitStack() as stack:
        for _ in range(students):
            registry = stack.enter_context(open_registry(url, timeout_s=30.0))
            stack.enter_context(registry.watch(service))
        for number in range(teachers):
            registry = stack.enter_context(open_registry(url, timeout_s=30.0))
            stack.enter_context(registry.register(Instance(service, f"t{number}", "127.0.0.1", 9000)))
        time.sleep(_SETTLED_S)
        level, propagates = log.level, log.propagate
        log.setLevel(logging.DEBUG)
        log.propagate = False
        log.addHandler(counter)
        try:
            time.sleep(seconds)
        finally:
            log.removeHandler(counter)
            log.setLevel(level)
            log.propagate = propagates
        return collections.Counter(counter.counts)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", required=True, help="kubernetes://NAMESPACE, with ?kubeconfig=PATH if need be")
    parser.add_argument("--teachers", type=int, default=20)
    parser.add_argument("--students", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args(argv)
    counts = measure(options.url, options.teachers, options.students, options.seconds)
    rates = {name: round(count / options.seconds, 3) for name, count in sorted(counts.items())}
    total = round(sum(counts.values()) / options.seconds, 3)
    size = {"teachers": options.teachers, "students": options.students}
    print(json.dumps({**size, "requests_per_s": total, "by_kind": rates}))


if __name__ == "__main__":
    main()
