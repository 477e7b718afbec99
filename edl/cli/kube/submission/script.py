"""A local script that is sent along with a job, in a ConfigMap.

What does not belong here: a project of several files, which belongs into the image.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edl.errors import SettingsError
from edl.master.kube.members.naming import MANAGED_BY

__all__ = ["MAX_SCRIPT_BYTES", "SCRIPT_FOLDER", "SCRIPT_LABEL", "LocalScript", "read_script"]

SCRIPT_FOLDER: Final = "/edl/script"
"""Where pods have it."""
SCRIPT_LABEL: Final = "edl.io/script-of"
"""Of a ConfigMap: the job that it is for."""
MAX_SCRIPT_BYTES: Final = 700_000
"""A ConfigMap, with names and JSON's escapes around its data, is at most 1 MiB; a file that is no text grows by 4/3."""

_DIGEST_CHARS: Final = 10
"""Of a ConfigMap's name: 40 bits tell the scripts of one job apart."""

_IN_IMAGE = "put it into the image, and give its path there with --script-in-image"


@dataclass(frozen=True)
class LocalScript:
    """A file of this machine.

    Attributes:
        path: as the user wrote it.
        name: of the file alone.
        content: of the file.
    """

    path: str
    name: str
    content: bytes

    def config_map_name(self, job: str) -> str:
        """Return the name of the ConfigMap that holds it, which another content does not have.

        A kubelet reads an immutable ConfigMap once, and keeps it by its name as long as any pod of its node uses it: a
        job that is made again under its name, while pods of the one before end, would run the script before.

        Args:
            job: name of the job.
        """
        digest = hashlib.sha256(self.name.encode() + b"\0" + self.content).hexdigest()
        return f"{job}-script-{digest[:_DIGEST_CHARS]}"

    def config_map(self, job: str) -> dict[str, object]:
        """Return the ConfigMap that holds it, without a namespace.

        It is immutable: a job's later pods have the script of its first, and no worker that may write to a Store in
        this namespace changes it.

        Args:
            job: name of the job.
        """
        try:
            data = {"data": {self.name: self.content.decode()}}
        except UnicodeDecodeError:
            data = {"binaryData": {self.name: base64.b64encode(self.content).decode()}}
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": self.config_map_name(job),
                "labels": {SCRIPT_LABEL: job, **dict([MANAGED_BY])},
            },
            **data,
            "immutable": True,
        }

    @property
    def path_in_pod(self) -> str:
        """Where the job's pods have it."""
        return f"{SCRIPT_FOLDER}/{self.name}"


def read_script(path: str) -> LocalScript:
    """Read a script of this machine.

    Args:
        path: by the user.

    Raises:
        SettingsError: it is no file, too large, or has a name that a ConfigMap cannot hold.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_SCRIPT_BYTES + 1)
    except FileNotFoundError:
        raise SettingsError(
            f"{path}: there is no such file here; of a script that is in the image, say --script-in-image"
        ) from None
    except OSError as exc:
        raise SettingsError(f"{path} cannot be read: {exc.strerror}") from exc
    if len(content) > MAX_SCRIPT_BYTES:
        raise SettingsError(
            f"{path} has more than {MAX_SCRIPT_BYTES:,} bytes, and what Kubernetes takes along is less than 1 MiB: "
            f"{_IN_IMAGE}"
        )
    name = Path(path).name
    if not all(char.isascii() and (char.isalnum() or char in "-_.") for char in name) or len(name) > 200:
        raise SettingsError(f"{name!r}: a ConfigMap takes names of letters, digits, '-', '_' and '.': rename it")
    return LocalScript(path, name, content)
