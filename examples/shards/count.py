"""Count the words of each label, as one of several workers: python count.py. Sum up: python count.py --total"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from pathlib import Path

from edl.datasets import load_dataset
from edl.master import MasterClient, ShardReader

COUNTS = Path("counts")


def work(pause_s: float) -> None:
    COUNTS.mkdir(exist_ok=True)
    rows = 0
    with MasterClient("reviews") as client, ShardReader(client, "data") as reader:
        dataset = None
        for shard in reader:
            if dataset is None:
                dataset = load_dataset(client.describe_dataset("data"))  # opens the file on this machine
            counts: dict[str, Counter[str]] = {"positive": Counter(), "negative": Counter()}
            for review in dataset.read(shard):
                counts[review["label"]].update(re.findall(r"[a-z]+", review["sentence"]))
                rows += 1
            time.sleep(pause_s)
            # Each shard has one file, renamed into place when complete. If a worker is killed after this line, its
            # shard is counted again into the same file.
            draft = COUNTS / f".{shard.id}"
            draft.write_text(json.dumps(counts))
            draft.rename(COUNTS / f"{shard.start}.json")
            # A shard is reported as done when the next one is taken.
    print(f"this worker has counted {rows:,} rows")


def total() -> None:
    counts: dict[str, Counter[str]] = {"positive": Counter(), "negative": Counter()}
    for path in COUNTS.glob("*.json"):
        for label, words in json.loads(path.read_text()).items():
            counts[label].update(words)
    for label, words in counts.items():
        most = ", ".join(f"{word} {count:,}" for word, count in words.most_common(5))
        print(f"{label}: {sum(words.values()):,} words, most often {most}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--total", action="store_true")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds to sleep per shard, to simulate more work")
    options = parser.parse_args()
    total() if options.total else work(options.pause)
