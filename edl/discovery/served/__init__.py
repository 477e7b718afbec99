"""A store that one process serves from its SQLite file, over gRPC, to processes on any host: `edl://HOST:PORT`.

`server` serves the store and keeps the metrics of the last hours. `host` decides which process on a host serves the
store of a training job. `store` is the client. `addresses` finds this host's addresses and diagnoses failed
connections.
"""

from __future__ import annotations

__all__: list[str] = []
