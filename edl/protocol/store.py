"""The message classes of a served Store, built from `store.binpb`; `store.pyi` gives their types."""

from __future__ import annotations

from edl.protocol.messages import load_messages

globals().update(load_messages("store"))
