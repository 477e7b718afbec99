"""The workers' side of a master: calls, shard readers, and adapters for other libraries.

`master_client` makes calls that wait for the master, over a channel to it. `shard_reader` iterates over shards; its
`conversation` thread exchanges turns with the master and tracks what is still unanswered. `torch` provides a data set
for `DataLoader`, `sharding_client` the API of ElasticDL and DLRover. What does not belong here: how data is read
(`edl.datasets`), and how a master handles calls.
"""

from edl.master.client.conversation import Shard
from edl.master.client.master_client import MasterClient
from edl.master.client.shard_reader import ShardReader
from edl.master.client.sharding_client import ShardingClient

__all__ = ["MasterClient", "Shard", "ShardReader", "ShardingClient"]
