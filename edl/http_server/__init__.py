"""Serves HTTP: a process's health and metrics (`health`), or an aiohttp application with TLS and tokens (`server`).

Only `health` works without aiohttp (the extras `dashboard` and `proxy`).
"""

__all__: list[str] = []
