"""Discovery on etcd: for a cluster that has one, such as the etcd of Kubernetes or of a cloud.

`target` is where the members are and how to authenticate, `client` speaks etcd's gRPC API behind one boundary for
errors; `registry` and `store` are the contracts on it. What does not belong here: anything that another implementation
needs as well.

There is no package of others behind it: those that are kept leave out what EDL needs of etcd, the others do not run
beside today's protobuf (docs/architecture.md). gRPC and protobuf are there for teachers anyway.
"""

from __future__ import annotations

__all__: list[str] = []
