"""What stores say of jobs and pools: how many members are wanted, and how far the work is.

A store is opened once, and watched once, however many resources name it. What does not belong here: the API server.
"""

from edl.master.kube.operator.stores.directory import StoreDirectory
from edl.master.kube.operator.stores.owner_keys import OwnerKeyCleanup

__all__ = ["OwnerKeyCleanup", "StoreDirectory"]
