"""A store that one process serves over gRPC, from its SQLite file, to processes on any host. URLs `edl://HOST:PORT`.

`server` serves it and keeps metrics of the last hours, `host` decides which process of a host serves for a training
job, `store` is the client, and `addresses` finds this host's addresses and diagnoses failed connections.
"""

from __future__ import annotations

__all__: list[str] = []
