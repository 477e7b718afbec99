"""What workers use of a job's master: calls that wait for it, readers of shards, and faces that other libraries have.

`connection` is a channel to a master, `master_client` the calls, `shard_session` what a reader and the master owe each
other (pure), `shard_reader` the reader with its thread, `torch` a data set for `DataLoader`, `sharding_client` the
calls that ElasticDL's and DLRover's users know.
What does not belong here: how data is read (`edl.datasets`), and what a master does with calls.
"""

from edl.master.client.master_client import MasterClient
from edl.master.client.shard_reader import ShardReader
from edl.master.client.shard_session import Shard
from edl.master.client.sharding_client import ShardingClient

__all__ = ["MasterClient", "Shard", "ShardReader", "ShardingClient"]
