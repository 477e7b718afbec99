"""The server side of a job's master: it leads or stands by, and journals each command before it answers the worker."""

from edl.master.server.master_server import MasterServer, MasterSettings

__all__ = ["MasterServer", "MasterSettings"]
