"""A web page that shows all jobs in a Store: the page's state as JSON, the server, and the static files.

`state` reads the records, `metrics` exports the state to Prometheus, `streams` polls the Store and sends events,
`server` serves the page, the state and the metrics, and `static` contains the page itself. `server` and `streams`
import aiohttp: import these two modules only to serve the page.
"""

__all__: list[str] = []
