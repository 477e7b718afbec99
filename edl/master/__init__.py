"""The master of a job: hands out its data shard by shard, and decides how many teachers and workers it needs."""

from edl.datasets import ShardSettings, open_dataset
from edl.master.client import MasterClient, Shard, ShardingClient, ShardReader
from edl.master.server import MasterServer, MasterSettings

__all__ = [
    "MasterClient",
    "MasterServer",
    "MasterSettings",
    "Shard",
    "ShardReader",
    "ShardSettings",
    "ShardingClient",
    "open_dataset",
]
