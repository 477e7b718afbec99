"""The message classes of etcd, built from `etcd.binpb`; `etcd.pyi` gives their types."""

from __future__ import annotations

from edl.protocol.messages import load_messages

globals().update(load_messages("etcd"))
