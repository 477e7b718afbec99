"""The server side of a job's master: leads or stands by, answers workers, and journals before it answers.

`MasterServer` is a candidate for its job. `term` orders and commits commands, tracks expiries, answers calls, and
builds the job's report for the Store. What does not belong here: the effect of commands (`edl.master.shards`) and their
storage (`edl.master.journal`).
"""

from edl.master.server.master_server import MasterServer, MasterSettings

__all__ = ["MasterServer", "MasterSettings"]
