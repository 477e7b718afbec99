"""Discovery on Consul, through the Consul agents on a cluster's machines.

`client` speaks its HTTP API, `store` is the store on it, `registry` has services as Consul's own. A process should talk
to the agent on its own machine: a registration and a lease live at the agent they were made at, so a load balancer in
front of several agents does not work.
"""

from __future__ import annotations

__all__: list[str] = []
