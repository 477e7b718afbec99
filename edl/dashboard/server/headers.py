"""Headers of every answer: nothing is loaded from another host, guessed, framed, or kept by a proxy.

What does not belong here: who gets an answer (`access`).
"""

from __future__ import annotations

from typing import Final

__all__ = ["HEADERS", "NO_STORE"]

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Server": "edl",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
NO_STORE: Final = {"Cache-Control": "no-store"}
"""For what changes with every answer, or is not for everybody."""
