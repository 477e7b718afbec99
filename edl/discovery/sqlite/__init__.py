"""Discovery on a SQLite file, for all processes of a machine, without a server.

`file` opens it, keeps its format and translates its errors, `tables` has the rows of leases and entries, which a served
store uses too, and `store` is the store on them.
"""

from __future__ import annotations

__all__: list[str] = []
