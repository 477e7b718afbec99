"""Discovery on Consul: for a cluster, through the Consul agents on its machines.

`target` is where the agent is and how to authenticate, `transport` moves bytes, `client` is py-consul behind a
boundary for errors; `registry`, `lease` and `store` are the contracts on them. What does not belong here: anything that
another implementation needs as well.

A process should talk to the agent on its own machine: a registration and a lease live at the agent they were made
at, so a load balancer in front of several agents does not do.
"""

from __future__ import annotations

__all__: list[str] = []
