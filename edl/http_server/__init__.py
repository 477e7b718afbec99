"""Serves HTTP: a process's health and metrics (`health`, without aiohttp), or an aiohttp application (`server`)."""

__all__: list[str] = []
