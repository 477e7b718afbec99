"""A Store that a process serves to others and to other hosts: gRPC over its SQLite file. URLs `edl://HOST:PORT`.

`server`, `servicer` and `listening` are the serving side, `host` decides which process of a host serves, `own_host`
which host that is; `target` is where a client connects and how, `client` its calls, `store` the contract over them,
`diagnosis` why nothing answers.
What does not belong here: which URL or option of `edl run` names such a store, and registries of services.
"""

from __future__ import annotations

__all__: list[str] = []
