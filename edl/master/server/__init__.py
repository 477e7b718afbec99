"""The server side of a job's master: leads or stands by, answers workers, and journals before it answers."""

from edl.master.server.master_server import MasterServer, MasterSettings

__all__ = ["MasterServer", "MasterSettings"]
