"""HTTP servers: `health` for a process's health and metrics (no aiohttp), `server` for an aiohttp application."""

__all__: list[str] = []
