"""Serves HTTP: a process's health and metrics (`health`), or an application of aiohttp with TLS and tokens (`server`).

Only `health` works without aiohttp (the extras `dashboard` and `proxy`): import the rest where a server is asked for.

What does not belong here: what is answered (`edl.dashboard`, `edl.proxy`).
"""

__all__: list[str] = []
