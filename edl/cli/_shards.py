"""How commands show the shards of a job's master: a line per data set, poisoned shards first with their reasons."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from edl.cli._changes import printable
from edl.dashboard.state.schema import DatasetStatus, MasterStatus, PoisonedShard

__all__ = ["master_lines"]

_MOST_POISONED = 5  # shards listed with their reason; the others are counted


def master_lines(master: MasterStatus) -> Iterator[Text]:
    """Yield lines about a master: where it is, then its data sets."""
    term = f", term {master.term}" if master.term is not None else ""
    where = f" at {printable(master.endpoint)}" if master.endpoint else ""
    age = f", last heard {master.age_s:.0f} s ago" if master.state == "silent" and master.age_s is not None else ""
    style = "" if master.state in ("leading", "done") else "bold red"
    yield Text.assemble("master ", (printable(master.state or "unknown"), style), f"{where}{term}{age}")
    for dataset in master.datasets:
        yield _counts(dataset)
        poisoned = dataset.shards["poisoned"]
        for shard in dataset.poisoned[:_MOST_POISONED]:
            yield Text(f"  {_poisoned(shard)}", "red")
        hidden = poisoned - min(len(dataset.poisoned), _MOST_POISONED)
        if poisoned and hidden > 0:
            yield Text(f"  and {hidden:,} more poisoned shards", "red")


def _counts(dataset: DatasetStatus) -> Text:
    shards = dataset.shards
    text = Text.assemble("dataset ", (printable(dataset.name), "bold"), ": ")
    if shards["poisoned"]:
        text.append(f"{shards['poisoned']:,} poisoned", "bold red").append(", ")
    text.append(f"{shards['done']:,} shards done, {shards['doing']:,} at work, {shards['todo']:,} to do")
    if dataset.epoch is not None and (dataset.epochs or 1) > 1:
        text.append(f", epoch {dataset.epoch + 1} of {dataset.epochs}")
    if dataset.units_per_s:
        text.append(f", {dataset.units_per_s:,.3g} units/s")
    if not dataset.ended:
        text.append(", more may come")
    if dataset.eta_s is not None and not dataset.finished:
        text.append(f", {dataset.eta_s:,.0f} s to go")
    return text


def _poisoned(shard: PoisonedShard) -> str:
    last = shard.failures[-1] if shard.failures else None
    why = f": {printable(last.reason)} ({printable(last.holder)})" if last is not None else ""
    return f"poisoned: shard {shard.shard} (units {shard.start} to {shard.stop}){why}"
