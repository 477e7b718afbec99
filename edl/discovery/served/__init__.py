"""A store that one process serves to others, and to other hosts: gRPC over its SQLite file. URLs `edl://HOST:PORT`.

`server` serves it, `series` keeps figures of the last hours beside it, `host` decides which process of a host serves
for a training job, `store` is the client, and `addresses` knows this host's addresses and why nothing answers at one.
"""

from __future__ import annotations

__all__: list[str] = []
