"""How fast a master hands out shards: transitions per second, each journalled before it is acknowledged.

Handing out a shard and reporting it as done are two transitions. The journal is a SQLite file, synced at each commit.
`per_s` uses the best numbers of workers and of shards per request; `single_per_s` uses one shard per request.
`vs_unjournalled` divides by the rate of an in-memory dictionary behind the same gRPC service, as in DLRover and
ElasticDL; `million_over_thousand` compares a million shards with a thousand.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from contextlib import ExitStack

from benchmarks._child import Child
from benchmarks._harness import Goal, Options, divide, main, note, progress, take_turns

GOALS = [
    Goal("per_s", 20_000),
    Goal("single_per_s", 2_000),
    Goal("million_over_thousand", 0.9),
    Goal("vs_unjournalled", 0.5),
]
_BATCHES = (16, 64, 256)
_STREAMS = (4, 16)
_SINGLE_STREAMS = 16
_PROBE_S = 1.0
"""Seconds per trial in the search for the best numbers of shards and workers."""


def measure(options: Options) -> dict[str, list[float]]:
    """Return rates and ratios of every round."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def child(module: str, *arguments: str) -> Child:
            return stack.enter_context(Child([sys.executable, "-m", f"benchmarks.{module}", *arguments]))

        edl = str(child("_shard_masters", "--journal", folder).ask()["endpoint"])
        peer = str(child("_shard_masters").ask()["endpoint"])
        load = child("_shard_workers")

        def rate(endpoint: str, dataset: str, streams: int, batch: int, seconds: float = options.seconds) -> float:
            asked = {"dataset": dataset, "streams": streams, "batch": batch, "seconds": seconds}
            return float(load.ask(timeout_s=60 + 10 * seconds, endpoint=endpoint, **asked)["per_s"])

        rates = {}
        for streams in _STREAMS:
            for batch in _BATCHES:
                progress(f"{streams} workers, {batch} shards per request")
                rates[streams, batch] = rate(edl, "thousand", streams, batch, min(_PROBE_S, options.seconds))
        best = max(rates, key=lambda key: rates[key])
        sides = {
            "thousand": functools.partial(rate, edl, "thousand", *best),
            "million": functools.partial(rate, edl, "million", *best),
            "dictionary": functools.partial(rate, peer, "thousand", *best),
            "single": functools.partial(rate, edl, "thousand", _SINGLE_STREAMS, 1),
            "single dictionary": functools.partial(rate, peer, "thousand", _SINGLE_STREAMS, 1),
            "alone": functools.partial(rate, edl, "thousand", 1, 1),
        }
        rounds = take_turns(sides, options.repeats)
    streams, batch = best
    note(f"{batch} shards per request and {streams} workers were best.\n")
    return {
        "per_s": rounds["thousand"],
        "single_per_s": rounds["single"],
        "million_over_thousand": divide(rounds["million"], rounds["thousand"]),
        "vs_unjournalled": divide(rounds["thousand"], rounds["dictionary"]),
        "single_vs_unjournalled": divide(rounds["single"], rounds["single dictionary"]),
    }


if __name__ == "__main__":
    main("shards", measure, GOALS, __doc__)
