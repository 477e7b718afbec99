"""The page of all jobs of a Store: its state as one JSON, the server that sends it, and the files that draw it.

`state` reads the records, `metrics` shows them to Prometheus, `streams` looks again and again, `server` sends it all,
and `static` has the page itself. `server` and `streams` import aiohttp: import them only to serve a page.
"""

__all__: list[str] = []
