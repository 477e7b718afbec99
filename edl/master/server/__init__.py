"""A job's master as a process runs it: leads or stands by, answers workers, and journals before it answers.

`MasterServer` is a candidate of its job. `term` orders commands, commits them, knows what has expired, answers calls,
and says what the job shows in the Store.
What does not belong here: what a command does (`edl.master.shards`) and where it is kept (`edl.master.journal`).
"""

from edl.master.server.master_server import MasterServer, MasterSettings

__all__ = ["MasterServer", "MasterSettings"]
