"""Trains a click model under `edl run`, on shards of a table from a master, with as many workers as there are."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from net import FIELDS, NUMBERS, WideDeep, area_under_curve
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from edl.collective import Checkpointer, State
from edl.datasets import load_dataset
from edl.master import MasterClient, ShardReader


def main() -> None:
    options = parse()
    dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    network = WideDeep(init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.Adagrad(network.deep.parameters(), lr=options.lr)
    # `progress` is the master's progress before it handed out the current shard, of which `batches` are trained.
    state = State(model=network, optimizer=optimizer, step=-1, progress=None, batches=0)
    with Checkpointer(state) as checkpointer, MasterClient(options.job) as client:
        checkpointer.restore()
        for name, table in shards(client, state):
            begin, losses, rows = time.monotonic(), torch.zeros(1), 0
            for total, ids, numbers, clicks in batches(table, options.batch, state.batches):
                loss = binary_cross_entropy_with_logits(network(ids, numbers), clicks, reduction="sum") / total
                loss.backward()
                gradients = [parameter.grad for parameter in network.deep.parameters()]
                together = parameters_to_vector(gradients)
                dist.all_reduce(together)
                vector_to_parameters(together, gradients)
                optimizer.step()
                optimizer.zero_grad()
                network.table.update(options.lr)
                losses += loss.detach() * total
                rows += total
                state.step += 1
                state.batches += 1
                checkpointer.save(state.step, samples=len(clicks))
            dist.all_reduce(losses)
            if rows:
                tell(f"{name}: loss {float(losses) / rows:.4f}, {rows / (time.monotonic() - begin):,.0f} rows/s")
        auc, rows = evaluate(network, options.batch)
        tell(f"AUC {auc:.6f} on {rows:,} rows, after {state.step + 1:,} steps")
    dist.destroy_process_group()


def shards(client: MasterClient, state: State) -> Iterator[tuple[str, Any]]:
    """Yield, on every worker, the shards that the first worker gets from the master, from the state's position on."""
    first = dist.get_rank() == 0
    if first:
        client.restore_progress("data", state.progress)  # later shards are handed out again
    data = load_dataset(client.describe_dataset("data"))
    # Without prefetching, nothing is handed out between the last report and `progress`.
    with ShardReader(client, "data", prefetch=0, explicit=True) if first else contextlib.nullcontext() as reader:
        while True:
            found = [client.progress("data"), next(reader, None)] if first else [b"", None]
            dist.broadcast_object_list(found)
            state.progress, shard = found
            if shard is None:
                return
            yield f"epoch {shard.epoch}, shard {shard.shard}", data.read_table(shard)
            if first:
                reader.report_done(shard)
            state.batches = 0


def batches(table: Any, batch: int, begin: int = 0) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Yield the size of each batch of a table, from batch `begin` on, and this worker's part of its columns."""
    columns = [torch.tensor(np.stack([table[name] for name in names], 1)) for names in (FIELDS, NUMBERS, ["click"])]
    for parts in list(zip(*(column.split(batch) for column in columns), strict=True))[begin:]:
        ids, numbers, clicks = (part.tensor_split(dist.get_world_size())[dist.get_rank()] for part in parts)
        yield len(parts[0]), ids, numbers, clicks[:, 0]


def evaluate(network: WideDeep, batch: int) -> tuple[float, int]:
    """Return the area under the ROC curve and the number of test rows. Each worker predicts a part of them."""
    found = []
    with torch.no_grad():
        for _, ids, numbers, clicks in batches(pq.read_table("test.parquet"), batch):
            found.append(torch.stack([network(ids, numbers), clicks]))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, torch.cat(found, 1))
    logits, clicks = torch.cat(everyone, 1)
    return area_under_curve(logits, clicks), len(clicks)


def tell(text: str) -> None:
    if dist.get_rank() == 0:
        world = dist.get_world_size()
        print(f"{text} by {world} worker{'s'[: world - 1]}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", default="clicks", help="the master's")
    parser.add_argument("--batch", type=int, default=1024, help="rows per step, over all workers")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
