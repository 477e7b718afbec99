"""What a kubernetes: URL may say."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from edl.discovery import open_registry, open_store
from edl.discovery.kubernetes.target import KubernetesTarget
from edl.discovery.urls import servers_of
from edl.errors import SettingsError

pytest.importorskip("kubernetes", reason="the package kubernetes is not installed")


def kubeconfig(path: Path) -> Path:
    path.write_text(
        json.dumps(
            {
                "clusters": [{"name": "c", "cluster": {"server": "https://198.51.100.7:6443"}}],
                "users": [{"name": "u", "user": {"token": "secret"}}],
                "contexts": [
                    {"name": name, "context": {"cluster": "c", "user": "u", "namespace": f"of-{name}"}} for name in "ab"
                ],
                "current-context": "a",
            }
        )
    )
    return path


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("kubernetes://me@ns", "no place for a token"),
        ("kubernetes://ns/path", "a namespace and at most"),
        ("kubernetes://host:6443", "no namespace"),
        ("kubernetes://A_b", "no namespace"),
        (f"kubernetes://{'x' * 64}", "no namespace"),
        ("kubernetes://ns?namespace=x", "unknown or empty option namespace"),
        ("kubernetes://ns?context=", "unknown or empty option context"),
    ],
)
def test_unusable_urls(url: str, words: str) -> None:
    for open_it in (open_registry, open_store):
        with pytest.raises(SettingsError, match=words):
            open_it(url)


def test_no_cluster_is_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="KUBECONFIG"):
        open_store("kubernetes://ns")


def test_options_and_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kubeconfig(tmp_path / "config with blank")
    target = KubernetesTarget.of(urlsplit(f"kubernetes://ns?kubeconfig={path}&context=b"), 3.0)
    settings = target.settings
    assert (settings.kubeconfig, settings.context, settings.namespace, settings.timeout_s) == (
        str(path),
        "b",
        "ns",
        3.0,
    )
    monkeypatch.setenv("KUBECONFIG", str(path))
    assert servers_of("kubernetes://ns") == [("198.51.100.7", 6443)]
    monkeypatch.setenv("EDL_POD_NAME", "p")
    assert KubernetesTarget.of(urlsplit("kubernetes://"), 3.0).pod is None, "a name alone is not enough"
    with open_store("kubernetes://") as store:
        assert "kubernetes://" in repr(store)
        assert store._api.client.namespace == "of-a"  # type: ignore[attr-defined]
        assert store._api.pod is None  # type: ignore[attr-defined]


def test_pod_owns_only_its_own_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner in another namespace or cluster: the garbage collector would delete what it owns."""
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config")))
    monkeypatch.setenv("EDL_POD_NAME", "p")
    monkeypatch.setenv("EDL_POD_UID", "u")
    with open_store("kubernetes://of-a") as store:
        assert store._api.pod is None  # type: ignore[attr-defined]
