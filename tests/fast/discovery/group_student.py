"""A student in a process of its own: prints what its balance group gives it, a JSON line each.

python -m tests.fast.discovery.group_student URL SERVICE STUDENT WANT TTL_S
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


class StudentProcess:
    """Starts one, and follows what it prints. `kill` is SIGKILL."""

    def __init__(self, url: str, service: str, student: str, want: int, ttl_s: float = 4.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, url, service, student, str(want), str(ttl_s)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.told: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.told.append(json.loads(line))

    @property
    def has(self) -> set[str]:
        return set(self.told[-1]["teachers"]) if self.told else set()

    @property
    def leads(self) -> bool:
        return bool(self.told) and bool(self.told[-1]["leads"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


def main(url: str, service: str, student: str, want: str, ttl_s: str) -> None:
    from edl.discovery import open_registry, open_store
    from edl.discovery.balance import group as module
    from edl.discovery.balance.group import BalanceGroup

    module.PATIENCE_S = 20.0  # a slow machine needs a second for less than the first links
    told = teachers = None
    with (
        open_registry(url) as registry,
        open_store(url) as store,
        BalanceGroup(registry, store, service, student, want=int(want), ttl_s=float(ttl_s)) as group,
    ):
        while True:
            if (snapshot := group.get(0.1)) is not None:
                teachers = [teacher.id for teacher in snapshot.instances]
            tell = {"teachers": teachers, "leads": group.is_leader}
            if teachers is not None and tell != told:
                told = tell
                print(json.dumps(tell), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
