"""The message classes of the master, built from `master.binpb`; `master.pyi` gives their types."""

from __future__ import annotations

from edl.protocol.messages import load_messages

globals().update(load_messages("master"))
