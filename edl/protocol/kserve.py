"""The message classes of KServe v2, built from `kserve.binpb`; `kserve.pyi` gives their types."""

from __future__ import annotations

from edl.protocol.messages import load_messages

globals().update(load_messages("kserve"))
