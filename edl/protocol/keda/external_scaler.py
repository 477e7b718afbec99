"""The message classes of KEDA's external scaler, built from `external_scaler.binpb`; the `.pyi` gives their types."""

from __future__ import annotations

from edl.protocol.messages import load_messages

globals().update(load_messages("keda/external_scaler"))
