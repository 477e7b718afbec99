"""The workers' side of a master: calls, shard readers, and adapters for other libraries."""

from edl.master.client.conversation import Shard
from edl.master.client.master_client import MasterClient
from edl.master.client.shard_reader import ShardReader
from edl.master.client.sharding_client import ShardingClient

__all__ = ["MasterClient", "Shard", "ShardReader", "ShardingClient"]
