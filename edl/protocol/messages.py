"""Message classes from a compiled `.proto`, in their own descriptor pool.

With protobuf's default pool, a process that also imports `tritonclient` would fail because of a duplicate symbol, since
EDL and `tritonclient` both define the package `inference`.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


def load_messages(name: str) -> dict[str, Any]:
    """Build the message classes and top-level enum values defined in this package's `NAME.binpb`."""
    files = descriptor_pb2.FileDescriptorSet.FromString(
        resources.files(__package__).joinpath(f"{name}.binpb").read_bytes()
    )
    pool = descriptor_pool.DescriptorPool()
    found: dict[str, Any] = {}
    for file in files.file:
        pool.AddSerializedFile(file.SerializeToString())
        for message in file.message_type:
            descriptor = pool.FindMessageTypeByName(f"{file.package}.{message.name}")
            found[message.name] = message_factory.GetMessageClass(descriptor)
        for enum in file.enum_type:
            found.update((value.name, value.number) for value in enum.value)
    return found
