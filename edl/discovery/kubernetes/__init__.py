"""Discovery on Kubernetes itself: for a cluster where nothing else is to be installed.

`target` is which cluster and namespace, `api` calls it behind a boundary for errors. `naming` says what EDL's objects
look like: keys and instances are ConfigMaps, leases are Leases. `leases` keeps a Lease renewed; `expiry` decides,
purely, which Leases are over, and `reaper` removes them with what belongs to them. `watching` follows objects; `store`
and `registry` are the contracts on all that.

Kubernetes ends no Lease by itself. Of all processes that have a store or registry of a namespace open, one removes the
Leases that are no longer renewed; the others stand by. Removal is what others see: a renewal reaches that process
only, and not every watcher. Clocks of machines are never compared: a Lease is over when it was not *seen* to
change for its length.

What does not belong here: pods and resources of the operator (`edl.master.kube`), and calls of the API as such
(`edl.kube`).
"""

from __future__ import annotations

__all__: list[str] = []
