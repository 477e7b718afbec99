"""Discovery on a SQLite file: for all processes of a machine, with no server to install.

`file` opens it, keeps its format and translates its errors, `leases` and `watch` are what both need, `entries` the rows
of a store; `registry` and `store` are the two contracts on it.
What does not belong here: anything that the Consul implementation needs as well.

Limits. The file must lie on a local file system: SQLite's shared memory and locks do not work across machines, and on a
network file system two machines would see truths of their own. Containers of a machine may share it through a common
folder. Who may write the file may register anything. A process that is stopped (SIGSTOP) in the microseconds in
which it writes keeps the others from writing until it goes on.
"""

from __future__ import annotations

__all__: list[str] = []
