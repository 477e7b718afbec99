"""A process that writes until it is killed or fenced (`python -m tests.fast.master.journal.processes URL STORE SEED`).

It prints a line when `append` or `snapshot` has returned, and never before.
"""

from __future__ import annotations

import contextlib
import random
import struct
import sys

from edl.discovery import open_store
from edl.errors import LeaseLostError
from edl.master.journal import open_journal

RECORD = struct.Struct("!QQQ")
"""The number of a group, of the record in it, and how many records the group has."""


def count(snapshot: bytes | None, records: list[bytes]) -> int:
    """How many groups there are; an AssertionError if any is torn, repeated or left out."""
    done = 0 if snapshot is None else int(snapshot.split(b" ")[0])
    expected = 0
    for record in records:
        group, number, size = RECORD.unpack_from(record)
        assert (group, number) == (done, expected), "a group is torn, repeated or left out"
        expected += 1
        if expected == size:
            done, expected = done + 1, 0
    assert expected == 0, "a group is torn"
    return done


def main(url: str, store_url: str, seed: str) -> None:
    choice = random.Random(seed)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(open_store(store_url)) if store_url else None
        journal = stack.enter_context(open_journal(url, store=store))
        journal.begin_term()
        group = count(*journal.load())
        print("begun", group, flush=True)
        while True:
            size = choice.randint(1, 8)
            padding = bytes(choice.choice([0, 100, 60_000]))
            journal.append([RECORD.pack(group, number, size) + padding for number in range(size)])
            group += 1
            print("group", group, flush=True)
            if choice.random() < 0.2:
                journal.snapshot(b"%d " % group + bytes(choice.choice([0, 400_000])))
                print("snapshot", group, flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except LeaseLostError:
        print("fenced", flush=True)
