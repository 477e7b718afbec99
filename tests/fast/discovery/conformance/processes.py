"""Other processes that take part in discovery, told by lines on their standard input what to do.

Run as a program (`python -m tests.fast.discovery.conformance.processes URL ...`) it is such a process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[4]


class Member:
    """A process that takes part. `say` and `hear` are one line each."""

    def __init__(self, url: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, url, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        """Its next line; pytest's own timeout is the deadline."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        self.say(line)
        return self.hear()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def finish(self) -> None:
        """Let it come to its end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(30) == 0

    def end(self) -> None:
        """Kill, and close the pipes."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def _register(url: str, service: str, name: str, ttl_s: str, state: str = "ready") -> None:
    from edl.discovery import open_registry
    from tests.fast.discovery.conformance.backends import teacher

    instance = teacher(service, name, state=state)
    with open_registry(url) as registry, registry.register(instance, float(ttl_s)):
        print("ready", flush=True)
        sys.stdin.readline()


def _hold(url: str, key: str, ttl_s: str) -> None:
    """Hold a key under a lease; answers whether the lease is lost."""
    from edl.discovery import open_store

    with open_store(url) as store, store.lease(float(ttl_s)) as lease:
        store.put(key, b"held", lease)
        print("ready", flush=True)
        while sys.stdin.readline():
            print("lost" if lease.lost else "kept", flush=True)


def _elect(url: str, name: str, value: str, ttl_s: str) -> None:
    """Stand in an election; answers whether this candidate leads."""
    from edl.discovery import open_store

    with open_store(url) as store, store.elect(name, value.encode(), float(ttl_s)) as election:
        print("ready", flush=True)
        while sys.stdin.readline():
            print("leader" if election.is_leader else "follower", flush=True)


def _race(url: str, folder: str, count: str) -> None:
    """Try to be the first on each of many keys; answers which were won."""
    from edl.discovery import open_store

    with open_store(url) as store, store.lease(60.0) as lease:
        print("ready", flush=True)
        sys.stdin.readline()
        won = [
            number
            for number in range(int(count))
            if store.compare_and_set(
                f"{folder}{number}", str(os.getpid()).encode(), None, lease if number % 2 else None
            )
        ]
        print(*won, flush=True)
        sys.stdin.readline()


def _add(url: str, key: str, count: str) -> None:
    """Count a shared number up, by compare-and-set."""
    from edl.discovery import open_store

    with open_store(url) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        for _ in range(int(count)):
            while True:
                entry = store.get(key)
                assert entry is not None
                if store.compare_and_set(key, str(int(entry.value) + 1).encode(), entry.version):
                    break
        print("done", flush=True)


def _fork(url: str, service: str) -> None:
    """Fork with everything open; the child uses each thing, and answers what that raised."""
    from edl.discovery import open_registry, open_store
    from edl.errors import EDLError
    from tests.fast.discovery.conformance.backends import teacher

    registry, store = open_registry(url), open_store(url)
    registration = registry.register(teacher(service), 4.0)
    watch, store_watch = registry.watch(service), store.watch(service)
    lease, election = store.lease(4.0), store.elect(service, b"x", 4.0)
    assert election.wait(20)
    uses: dict[str, Callable[[], object]] = {
        "register": lambda: registry.register(teacher(service, "child")),
        "snapshot": lambda: registry.snapshot(service),
        "services": registry.services,
        "watch": lambda: registry.watch(service),
        "update": lambda: registration.update(teacher(service, state="draining")),
        "watch.get": lambda: watch.get(0.1),
        "store.get": lambda: store.get(service),
        "store.list": lambda: store.list(service),
        "store.put": lambda: store.put(service, b""),
        "store.compare_and_set": lambda: store.compare_and_set(service, b"", None),
        "store.delete": lambda: store.delete(service),
        "store.watch": lambda: store.watch(service),
        "store.lease": store.lease,
        "store.elect": lambda: store.elect("x", b""),
        "store_watch.get": lambda: store_watch.get(0.1),
        "lost": lambda: lease.lost,
        "is_leader": lambda: election.is_leader,
        "leader": election.leader,
        "wait": lambda: election.wait(0.1),
    }
    child = os.fork()
    if child == 0:
        for name, use in uses.items():
            try:
                use()
                print(name, "nothing", flush=True)
            except EDLError as exc:
                print(name, type(exc).__name__, flush=True)
        for thing in (registration, watch, store_watch, lease, election, registry, store):
            thing.close()
        print("closed", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(4.2)  # longer than the leases, so that a child that harmed them shows
    kept = not lease.lost and election.is_leader and not registration.error
    print("kept" if kept and registry.snapshot(service).instances else "harmed", flush=True)
    for thing in (registration, watch, store_watch, lease, election, registry, store):
        thing.close()


if __name__ == "__main__":
    commands = {"register": _register, "hold": _hold, "elect": _elect, "race": _race, "add": _add, "fork": _fork}
    commands[sys.argv[2]](sys.argv[1], *sys.argv[3:])
