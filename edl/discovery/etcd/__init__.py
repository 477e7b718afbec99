"""Discovery on etcd: for a cluster that has it, such as the etcd of Kubernetes or of a cloud.

`target` is where the members are and how to authenticate, `client` speaks etcd's gRPC API behind a boundary for
errors; `registry` and `store` are the contracts on it. What does not belong here: anything that another implementation
needs as well.

No client library is behind it: maintained libraries leave out what EDL needs of etcd, the others do not run
beside today's protobuf (docs/architecture.md). gRPC and protobuf are there for teachers anyway.
"""

from __future__ import annotations

__all__: list[str] = []
