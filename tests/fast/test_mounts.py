"""A registry on a network file system is refused. The mount tables are written here, but for this process's own."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from edl import mounts, settings
from edl.discovery import open_registry, open_store
from edl.errors import DiscoveryError, SettingsError
from tests.waiting import DEADLINE_S

TABLE = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
36 27 0:33 / /net rw,relatime - autofs systemd-1 rw,fd=51
88 36 0:52 /export /net/ann rw,relatime - nfs4 filer:/export/ann rw,vers=4.2
90 88 0:60 / /net/ann/local rw - xfs /dev/sdb1 rw
91 27 0:61 / /mnt/with\040blank rw master:2 shared:9 - cifs //server/share rw
92 27 0:62 / /remote rw - fuse.sshfs host:/ rw
93 27 0:63 / /encrypted rw - fuse.gocryptfs /cipher rw
94 27 0:64 / /over rw - nfs a:/b rw
95 94 0:65 / /over rw - tmpfs tmpfs rw
96 27 0:66 / /scratch rw - lustre 10.0.0.1@o2ib:/scratch rw
torn line
"""


@pytest.mark.parametrize(
    ("path", "kind", "shared"),
    [
        ("/var/lib/edl.sqlite", "ext4", False),
        ("/net/ann/.cache/edl/discovery.sqlite", "nfs4", True),
        ("/net/annette/x", "autofs", False),
        ("/net/ann/local/x", "xfs", False),
        ("/mnt/with blank/x", "cifs", True),
        ("/remote/x", "fuse.sshfs", True),
        ("/over/x", "tmpfs", False),
        ("/scratch", "lustre", True),
        ("/encrypted", "fuse.gocryptfs", False),
    ],
)
def test_the_type_under_a_path_is_found(path: str, kind: str, shared: bool) -> None:
    assert mounts.file_system(path, TABLE) == kind
    assert mounts.is_shared(kind) is shared


@pytest.fixture
def on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    table = f"{TABLE}99 27 0:77 / {tmp_path} rw - nfs4 filer:/t rw\n"
    monkeypatch.setattr(mounts, "read_mounts", lambda: table)  # a fake: nothing here serves NFS
    return f"sqlite:///{tmp_path}/cache/discovery.sqlite"


def test_a_file_on_nfs_is_refused(on_nfs: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    for opened in (open_registry, open_store):
        with pytest.raises(SettingsError, match=r"nfs4.*consul://.*EDL_SHARED_FILE") as caught:
            opened(on_nfs)
        assert not isinstance(caught.value, DiscoveryError), "trying again does not help"
    assert not Path(on_nfs.removeprefix("sqlite://")).parent.exists(), "nothing was made there"
    link = tmp_path_factory.mktemp("home") / "cache"
    link.symlink_to(tmp_path)
    with pytest.raises(SettingsError, match="nfs4"):
        open_registry(f"sqlite:///{link}/discovery.sqlite")


def test_who_knows_better_is_warned(
    on_nfs: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EDL_SHARED_FILE", "1")
    caplog.set_level(logging.WARNING, "edl.discovery")
    with open_registry(on_nfs) as registry, registry.watch("s") as watch:
        assert watch.get(DEADLINE_S) is not None
    assert len([record for record in caplog.records if "nfs4" in record.getMessage()]) == 1, "once a file"
    monkeypatch.setenv("EDL_SHARED_FILE", "maybe")
    with pytest.raises(SettingsError, match="EDL_SHARED_FILE='maybe'"):
        open_registry(on_nfs)


def shared_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory on NFS, and where this machine has its own files."""
    home, local = folder / "home", folder / "local"
    local.mkdir()
    (folder / "mountinfo").write_text(f"{TABLE}99 27 0:70 / {home} rw - nfs4 filer:/home rw\n")
    monkeypatch.setattr(mounts, "_MOUNTS", folder / "mountinfo")
    monkeypatch.setattr(settings, "_LOCAL", local)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
    return local


def test_default_file_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where homes are shared, as on most clusters, what needs no cluster goes on to need none."""
    local = shared_home(tmp_path, monkeypatch)
    url = settings.default_discovery_url()
    assert url == f"sqlite:///{local}/edl-{os.getuid()}/discovery.sqlite"
    with open_store(url) as store:
        store.put("key", b"value")
    assert (local / f"edl-{os.getuid()}").stat().st_mode & 0o077 == 0
    monkeypatch.setenv("EDL_SHARED_FILE", "1")
    assert settings.default_discovery_url() == f"sqlite:///{tmp_path}/home/.cache/edl/discovery.sqlite"


@pytest.mark.parametrize("kind", ["link", "open", "file"])
def test_default_folder_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    folder = shared_home(tmp_path, monkeypatch) / f"edl-{os.getuid()}"
    if kind == "link":
        folder.symlink_to(tmp_path)
    elif kind == "open":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.touch()
    with pytest.raises(SettingsError, match=r"EDL_DISCOVERY, sqlite:///PATH"):
        settings.default_discovery_url()
