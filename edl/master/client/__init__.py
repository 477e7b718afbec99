"""The workers' side of a master: calls, readers of shards, and adapters for other libraries.

`master_client` makes calls that wait for the master, and has the channel to it. `shard_reader` iterates over shards;
its `conversation` is a thread that takes turns with the master, and what the two sides owe each other.
`torch` has a data set for `DataLoader`, and `sharding_client` the calls of ElasticDL and DLRover.
What does not belong here: how data is read (`edl.datasets`), and what a master does with calls.
"""

from edl.master.client.conversation import Shard
from edl.master.client.master_client import MasterClient
from edl.master.client.shard_reader import ShardReader
from edl.master.client.sharding_client import ShardingClient

__all__ = ["MasterClient", "Shard", "ShardReader", "ShardingClient"]
