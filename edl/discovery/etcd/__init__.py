"""Discovery on etcd: `client` speaks its gRPC API, `store` is the store on it."""

from __future__ import annotations

__all__: list[str] = []
