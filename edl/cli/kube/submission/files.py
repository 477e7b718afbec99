"""Manifests of a file, as `edl submit -f` reads them: jobs and pools, and what goes with them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from edl.cli.kube.submission.yaml_loader import load_documents
from edl.errors import SettingsError
from edl.kube.objects import Object
from edl.kube.resource_types import CONFIG_MAPS, ELASTIC_JOBS, TEACHER_POOLS, ResourceType

__all__ = ["dump_manifests", "load_template", "manifest_type", "read_manifests"]

_TYPES: Final = {(item.api_version, item.kind): item for item in (ELASTIC_JOBS, TEACHER_POOLS, CONFIG_MAPS)}
_MAX_BYTES: Final = 8 * 1024 * 1024
"""Of a file: Kubernetes takes objects of some 1.5 MB, and YAML of many megabytes takes minutes to read."""
_PLAIN: Final = re.compile(r"(?!(?:y|n|yes|no|on|off|true|false|null)\Z)[a-z/][a-z0-9/._-]*", re.IGNORECASE)
"""Texts that are texts for every reader of YAML without quotes. Readers differ on others: PyYAML takes 1e-3 and y as
texts, kubectl as a number and a boolean."""


def manifest_type(manifest: Mapping[str, Any]) -> ResourceType:
    """Return the kind of a manifest.

    Args:
        manifest: checked by `read_manifests`.
    """
    return _TYPES[manifest["apiVersion"], manifest["kind"]]


def read_manifests(path: str) -> list[Object]:
    """Read the manifests of a file.

    Args:
        path: of the file; "-" for standard input.

    Returns:
        Its objects, lists taken apart.

    Raises:
        SettingsError: it cannot be read, is no YAML, or has something else than jobs, pools and ConfigMaps in it.
    """
    documents = [item for item in _load_all(path) if item is not None]
    found = [part for item in documents for part in _parts(item)]
    if not found:
        raise SettingsError(f"{path}: there is no manifest in it")
    for number, item in enumerate(found, 1):
        _check(path, number, item)
    return found


def load_template(path: str) -> dict[str, object]:
    """Read a PodTemplateSpec, or a Pod, of a file.

    Args:
        path: of the file.

    Raises:
        SettingsError: it cannot be read, or is something else.
    """
    documents = _load_all(path)
    found = documents[0] if len(documents) == 1 else None
    if not isinstance(found, dict) or not isinstance(found.get("spec"), dict):
        raise SettingsError(f"{path}: expected a single pod template, with metadata (or without) and spec")
    return {name: found[name] for name in ("metadata", "spec") if name in found}


def dump_manifests(manifests: Iterable[Mapping[str, Any]]) -> str:
    """Return manifests as YAML that `kubectl apply -f -` takes.

    Args:
        manifests: in order.
    """
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
        """Writes texts of several lines as blocks, which people can read, and quotes what a reader may misread."""

    def represent(dumper: Any, text: str) -> Any:
        style = "|" if "\n" in text else None if _PLAIN.fullmatch(text) else "'"
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represent)
    dumped = yaml.dump_all(manifests, Dumper=Dumper, sort_keys=False, default_flow_style=False, explicit_start=True)
    return str(dumped)


def _load_all(path: str) -> list[Any]:
    try:
        text = sys.stdin.read(_MAX_BYTES + 1) if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as exc:
        raise SettingsError(f"{path} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise SettingsError(f"{path} is no text in UTF-8") from exc
    if len(text) > _MAX_BYTES:
        raise SettingsError(f"{path} is larger than {_MAX_BYTES:,} bytes, which no manifest is")
    try:
        documents = load_documents(text)
        json.dumps(documents, allow_nan=False)  # bytes and the like are YAML's, and no JSON
    except (TypeError, ValueError, RecursionError) as exc:
        raise SettingsError(f"{path} is no YAML of a manifest: {exc}") from exc
    return documents


def _parts(document: Any) -> list[Any]:
    if isinstance(document, dict) and document.get("kind") == "List" and isinstance(document.get("items"), list):
        return list(document["items"])
    return [document]


def _check(path: str, number: int, item: Any) -> None:
    if not isinstance(item, dict):
        raise SettingsError(f"{path}: manifest {number} is no object, but {type(item).__name__}")
    kind = item.get("apiVersion"), item.get("kind")
    if not all(isinstance(word, str) for word in kind) or kind not in _TYPES:
        known = ", ".join(f"{api} {name}" for api, name in _TYPES)
        raise SettingsError(
            f"{path}: manifest {number} is {kind[0]} {kind[1]}, and `edl submit` takes {known}: `kubectl apply -f` "
            "takes all kinds"
        )
    metadata = item.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        raise SettingsError(f"{path}: manifest {number} ({kind[1]}) has no metadata.name")
