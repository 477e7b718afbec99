"""A job's master as a process runs it: leads or stands by, answers workers, and journals before it answers.

`MasterServer` is a candidate of its job; `sequencer` puts commands in an order and commits them in groups, `servicer`
answers calls, `lease_clock` says what has expired, `report` what is shown, `grpc_server` listens.
What does not belong here: what a command does (`edl.master.shards`) and where it is kept (`edl.master.journal`).
"""

from edl.master.server.master_server import MasterServer, MasterSettings

__all__ = ["MasterServer", "MasterSettings"]
