"""Other processes that take part in discovery, told by lines on their standard input what to do.

Run as a program (`python -m tests.fast.discovery.conformance.processes URL ...`) it is such a process. Leases are short
where they are to lapse, so a process that stood still begins anew.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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

    def end(self) -> None:
        """Kill, and close the pipes."""
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()


@contextlib.contextmanager
def members(url: str) -> Iterator[Callable[..., Member]]:
    """Start processes; they are killed at the end."""
    with contextlib.ExitStack() as started:

        def start(*arguments: str) -> Member:
            member = Member(url, *arguments)
            started.callback(member.end)
            return member

        yield start


def _answer(tell: Callable[[], str]) -> None:
    """Say that it is ready, and answer each line."""
    print("ready", flush=True)
    while sys.stdin.readline():
        print(tell(), flush=True)


def _register(url: str, service: str, name: str, ttl_s: str, state: Any = "ready") -> None:
    """Register until a line comes."""
    from edl.discovery import Instance, open_registry

    instance = Instance(service, name, "127.0.0.1", 9000, state=state)
    with open_registry(url, timeout_s=30.0) as registry, registry.register(instance, float(ttl_s)):
        print("ready", flush=True)
        sys.stdin.readline()


def _hold(url: str, key: str, ttl_s: str) -> None:
    """Hold a key under a lease; answers whether the lease is lost."""
    from edl.discovery import open_store
    from edl.errors import LeaseLostError

    with open_store(url, timeout_s=30.0) as store:
        while True:
            lease = store.lease(float(ttl_s))
            with contextlib.suppress(LeaseLostError):
                store.put(key, b"held", lease)
                break
        _answer(lambda: "lost" if lease.lost else "kept")


def _elect(url: str, name: str, value: str, ttl_s: str) -> None:
    """Stand in an election; answers whether this candidate leads."""
    from edl.discovery import open_store

    with open_store(url, timeout_s=30.0) as store, store.elect(name, value.encode(), float(ttl_s)) as election:
        _answer(lambda: "leader" if election.is_leader else "follower")


def _balance(url: str, service: str, student: str) -> None:
    """Take part in a balance group; answers whether this student decides who gets which teachers."""
    from edl.discovery import open_registry, open_store
    from edl.discovery.group import BalanceGroup

    with (
        open_registry(url, timeout_s=30.0) as registry,
        open_store(url, timeout_s=30.0) as store,
        BalanceGroup(registry, store, service, student, want=2, ttl_s=1.0) as group,
    ):
        _answer(lambda: "leader" if group.is_leader else "follower")


def _compete(url: str, folder: str, count: str) -> None:
    """Try to be the first on each of many keys, then count a shared number up; answers which keys were won."""
    from edl.discovery import open_store

    with open_store(url, timeout_s=30.0) as store, store.lease(600.0) as lease:
        print("ready", flush=True)
        sys.stdin.readline()
        own = str(os.getpid()).encode()
        numbers = range(int(count))
        won = [n for n in numbers if store.compare_and_set(f"{folder}{n}", own, None, lease if n % 2 else None)]
        for _ in numbers:
            while True:
                entry = store.get(f"{folder}sum")
                assert entry is not None
                if store.compare_and_set(entry.key, str(int(entry.value) + 1).encode(), entry.version):
                    break
        print(*won, flush=True)
        sys.stdin.readline()


def _fork(url: str, service: str) -> None:
    """Fork with everything open; the child uses each thing, and answers what that raised."""
    from edl.discovery import Instance, open_registry, open_store
    from edl.errors import EDLError

    instance = Instance(service, "a", "127.0.0.1", 9000)
    registry, store = open_registry(url, timeout_s=30.0), open_store(url, timeout_s=30.0)
    registration = registry.register(instance, 600.0)
    watch, store_watch = registry.watch(service), store.watch(service)
    lease, election = store.lease(600.0), store.elect(service, b"x", 600.0)
    assert election.wait(90)
    store.put(f"{service}/a", b"1", lease)
    uses: dict[str, Callable[[], object]] = {
        "register": lambda: registry.register(instance),
        "snapshot": lambda: registry.snapshot(service),
        "services": registry.services,
        "watch": lambda: registry.watch(service),
        "update": lambda: registration.update(instance),
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
    things = (registration, watch, store_watch, lease, election, registry, store)
    child = os.fork()
    if child == 0:
        for name, use in uses.items():
            try:
                use()
                print(name, "nothing", flush=True)
            except EDLError as exc:
                print(name, type(exc).__name__, flush=True)
        for thing in things:
            thing.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    kept = not lease.lost and election.is_leader and not registration.error
    held = store.put(f"{service}/a", b"2", lease) and registry.snapshot(service).instances == (instance,)
    print("kept" if kept and held else "harmed", flush=True)
    for thing in things:
        thing.close()


if __name__ == "__main__":
    commands = {"register": _register, "hold": _hold, "elect": _elect, "compete": _compete, "fork": _fork}
    commands["balance"] = _balance
    commands[sys.argv[2]](sys.argv[1], *sys.argv[3:])
