"""Works through units that take a fixed time each, with any number of workers. A unit stands for work on a GPU.

    edl run working.py FOLDER --units 60 --unit-s 1

A worker claims a unit by locking the unit's file, and writes into the file when the unit is done. The lock ends with
the worker, so another worker restarts a unit that was not completed. A unit counts once, whenever a worker is killed.
"""

import argparse
import fcntl
import json
import os
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--units", type=int, default=60)
parser.add_argument("--unit-s", type=float, default=1.0)
options = parser.parse_args()
pod = os.environ.get("HOSTNAME", "")
diary = os.open(options.folder / "diary.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)


def format_entry(kind: str, **fields: object) -> bytes:
    return (json.dumps({"kind": kind, "at": time.time(), "pod": pod, "pid": os.getpid(), **fields}) + "\n").encode()


def work(unit: int) -> bool:
    """Do a unit, or return False if another worker holds it. The entry goes into the unit's file in a single write."""
    file = os.open(options.folder / f"unit-{unit}", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        if os.fstat(file).st_size == 0:
            begin = time.time()
            time.sleep(options.unit_s)
            entry = format_entry("unit", unit=unit, begin=begin)
            os.write(file, entry)
            os.write(diary, entry)  # missing if the worker is killed here
        return True
    finally:
        os.close(file)


world = int(os.environ["WORLD_SIZE"])
os.write(diary, format_entry("start", world=world))
left = list(range(options.units))
while left:
    left = [unit for unit in left if not work(unit)]
    if left:
        time.sleep(0.05)
os.write(diary, format_entry("end"))
