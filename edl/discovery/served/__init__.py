"""A Store that one process serves to others and to other hosts: gRPC over its SQLite file. URLs `edl://HOST:PORT`.

`server` and `servicer` are the serving side, `host` decides which process of a host serves; `target` is where a client
connects and how, `client` its calls, `store` the contract over them, `diagnosis` why nothing answers.
What does not belong here: which URL or option of `edl run` names such a store, and registries of services.
"""

from __future__ import annotations

__all__: list[str] = []
