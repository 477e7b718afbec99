"""HTTP servers for a process's health and metrics (`health`, without aiohttp), or an aiohttp app (`server`)."""

__all__: list[str] = []
