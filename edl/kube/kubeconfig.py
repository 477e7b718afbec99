"""What a kubeconfig says of the chosen context, also where the official client passes over it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from edl.errors import SettingsError
from edl.quoting import shown

__all__ = ["load_kubeconfig"]

_IMPERSONATION: Final = ("as", "as-uid", "as-groups", "as-user-extra")


def load_kubeconfig(configuration: Any, path: str, context: str) -> str:
    """Fill in what a kubeconfig says.

    Args:
        configuration: of the official client.
        path: of the file, or of several as in KUBECONFIG; empty for `~/.kube/config`.
        context: its context; empty for its current one.

    Returns:
        The context's namespace; empty where it has none.

    Raises:
        SettingsError: it asks for something that is not known here.
        Exception: of any kind, where the file makes no sense: yaml, keys, base64.
    """
    from kubernetes import config
    from kubernetes.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION, KubeConfigMerger

    config.load_kube_config(
        path or None, context=context or None, client_configuration=configuration, persist_config=False
    )
    merged = KubeConfigMerger(path or KUBE_CONFIG_DEFAULT_LOCATION).config
    chosen = _entry(merged, "context", context or merged["current-context"])
    user = _entry(merged, "user", chosen.get("user"))
    if impersonation := [name for name in _IMPERSONATION if user.get(name)]:
        raise SettingsError(
            f"user {chosen.get('user')!r} sets {', '.join(impersonation)}: EDL cannot act as another, and does not act"
            " with all rights of that user instead. Name a context with the credentials of whom it is to be"
        )
    _use_proxy(configuration, str(_entry(merged, "cluster", chosen.get("cluster")).get("proxy-url") or ""))
    return str(chosen.get("namespace") or "")


def _entry(merged: Any, kind: str, name: Any) -> Mapping[str, Any]:
    """Return a context, user or cluster by its name; nothing where there is none."""
    found = merged[f"{kind}s"].get_with_name(name, safe=True)
    value = found.safe_get(kind) if found is not None else None
    return getattr(value, "value", value) or {}


def _use_proxy(configuration: Any, url: str) -> None:
    """Have a cluster's proxy used, which goes before the environment's, as for kubectl."""
    if not url:
        return
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise SettingsError(f"proxy-url {shown(parts.scheme)}://…: only http:// and https:// are known")
    configuration.proxy = url
    configuration.no_proxy = None
