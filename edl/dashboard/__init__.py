"""A web page with all jobs of a Store: its state as JSON, the server, and the static files.

`state` reads the records, `metrics` exports them to Prometheus, `streams` polls the Store and sends events, `server`
serves it all, and `static` contains the page itself. `server` and `streams` import aiohttp: import them only to serve.
"""

__all__: list[str] = []
