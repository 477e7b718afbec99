"""What a kubeconfig says of the chosen context, also where the official client passes over it."""

from __future__ import annotations

import concurrent.futures
import sys
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from edl.background import start_call
from edl.errors import SettingsError
from edl.quoting import shown

__all__ = ["load_kubeconfig"]

_LOGIN_S: Final = 30.0
"""For a plugin to give credentials where it may ask a person."""
_IMPERSONATION: Final = ("as", "as-uid", "as-groups", "as-user-extra")


def load_kubeconfig(configuration: Any, path: str, context: str, plugin_s: float) -> str:
    """Fill in what a kubeconfig says.

    Args:
        configuration: of the official client.
        path: of the file, or of several as in KUBECONFIG; empty for `~/.kube/config`.
        context: its context; empty for its current one.
        plugin_s: for a plugin to give credentials where no terminal is there, in seconds.

    Returns:
        The context's namespace; empty where it has none.

    Raises:
        SettingsError: it asks for something that is not known here, or its plugin gives no credentials.
        Exception: of any kind, where the file makes no sense: yaml, keys, base64.
    """
    from kubernetes import config
    from kubernetes.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION, KubeConfigMerger

    merged = KubeConfigMerger(path or KUBE_CONFIG_DEFAULT_LOCATION).config
    chosen = _entry(merged, "context", context or merged["current-context"])
    user = _entry(merged, "user", chosen.get("user"))
    if impersonation := [name for name in _IMPERSONATION if user.get(name)]:
        raise SettingsError(
            f"user {chosen.get('user')!r} sets {', '.join(impersonation)}: EDL cannot act as another, and does not act"
            " with all rights of that user instead. Name a context with the credentials of whom it is to be"
        )

    def load() -> None:
        config.load_kube_config(
            path or None, context=context or None, client_configuration=configuration, persist_config=False
        )

    if user.get("exec"):
        plugin = f"the command {shown(user['exec'].get('command'))!r} of user {chosen.get('user')!r}"
        limit_s = max(plugin_s, _LOGIN_S) if sys.stdin.isatty() and sys.stdout.isatty() else plugin_s
        try:
            start_call("edl-kubeconfig", load).result(limit_s)
        except concurrent.futures.TimeoutError as exc:
            raise SettingsError(f"{plugin} gives no credentials within {limit_s:g} s: run it by hand") from exc
        if not configuration.api_key.get("authorization") and not configuration.cert_file:
            raise SettingsError(f"{plugin} gives no credentials, the log has why: run it by hand")
        configuration.refresh_api_key_hook = None  # it has no deadline; the answer 401 has this be read again
    else:
        load()
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
