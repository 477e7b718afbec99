"""TLS and tokens on every wire: files of certificates and tokens, their checks, and why a handshake failed.

`credentials` reads the files again when they change, `certificates` checks what is in them, `handshake` and
`verification` explain failures, `peers` makes contexts for sockets between agents. What does not belong here: gRPC
channels and ports (`edl.protocol.channel`), and which settings name the files (`edl.settings`).
"""

from __future__ import annotations

__all__: list[str] = []
