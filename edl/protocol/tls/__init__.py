"""TLS and tokens on every wire: files of certificates and tokens, their checks, and why a handshake failed.

`credentials` reads the files again when they change, `certificates` checks what is in them, `handshake` and
`verification` explain failures, `peers` makes contexts for sockets between agents.
"""

from __future__ import annotations

__all__: list[str] = []
