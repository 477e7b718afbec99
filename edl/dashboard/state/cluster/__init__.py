"""Jobs and pools of a Kubernetes cluster, as the page, `edl jobs` and `edl status` show them.

`schema` has the dataclasses, `decoding` makes them of the API's objects, and `reader` asks the API. What stands in an
object may come from anybody who may write it: each field is of its type and bounded, or None.

What does not belong here: what should be (`edl.master.kube`); nothing here writes to a cluster.
"""

__all__: list[str] = []
