"""What `edl run` makes of its command line: the digest of the command, and how long a rendezvous waits."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from edl.collective.agent.command_line.cli import _command, _launch
from edl.collective.agent.command_line.options import parse_options
from edl.errors import SettingsError


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Return two projects, which have a script of the same name."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.sh").touch()
    return tmp_path / "first", tmp_path / "second"


def digests(folders: tuple[Path, Path], *argv: str) -> set[str]:
    """Return the digests of a command that is given in several folders."""
    found = set()
    for folder in folders:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            found.add(_command(parse_options(list(argv), None)))
    return found


def test_program_is_found_on_the_path(folders: tuple[Path, Path]) -> None:
    assert len(digests(folders, "--no-python", "bash", str(folders[0] / "train.sh"))) == 1
    assert len(digests(folders, "--no-python", "bash")) == 1


def test_projects_have_their_own_commands(folders: tuple[Path, Path]) -> None:
    assert len(digests(folders, "-m", "train")) == 2
    assert len(digests(folders, "--no-python", "bash", "train.sh")) == 2
    assert len(digests(folders, "train.sh")) == 2


def test_script_is_named_from_anywhere(folders: tuple[Path, Path]) -> None:
    argv = ("--no-python", "bash", "-e")
    absolute = digests(folders, *argv, str(folders[0] / "train.sh"), "out.log")
    assert absolute == digests((folders[0], folders[0]), *argv, "train.sh", "out.log")


def test_takeover_timeout_is_read(folders: tuple[Path, Path]) -> None:
    argv = ["--nnodes", "1:2", "--rdzv-id", "job", str(folders[0] / "train.sh")]

    def takeover_s(conf: dict[str, str]) -> float:
        with ExitStack() as stack:
            return _launch(parse_options(argv, None), conf, "sqlite:///store", stack).rendezvous.takeover_s

    assert takeover_s({}) == 10.0
    assert takeover_s({"takeover_timeout": "45"}) == 45.0
    with pytest.raises(SettingsError, match="takeover_timeout"):
        takeover_s({"takeover_timeout": "soon"})


def test_nobody_joins_a_job_without_a_name(folders: tuple[Path, Path]) -> None:
    """Its node trains on without the store, so that another under its name would train beside it."""
    script = str(folders[0] / "train.sh")
    with ExitStack() as stack:
        alone = _launch(parse_options([script], None), {}, "sqlite:///store", stack)
        named = _launch(parse_options(["--rdzv-id", "run-1", script], None), {}, "sqlite:///store", stack)
        assert (alone.resumable, named.resumable) == (False, True)
        with pytest.raises(SettingsError, match="no other can join it"):
            _launch(parse_options(["--rdzv-id", alone.job, script], None), {}, "sqlite:///store", stack)


def test_rendezvous_pairs_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator names a pair of its own: a user's other pair leaves it as it is, and the same one wins."""
    monkeypatch.setenv("PET_RDZV_CONF", "last_call_timeout=9")
    found = parse_options(["train.py"], None).rdzv_conf
    assert found == "last_call_timeout=9"
    argv = ["--rdzv-conf", "takeover_timeout=45", "--rdzv-conf=join_timeout=600", "train.py", "--rdzv-conf", "its-own"]
    assert parse_options(argv, None).rdzv_conf == "takeover_timeout=45,join_timeout=600"
    argv = ["--rdzv-conf", "takeover_timeout=45", "--rdzv-conf", "takeover_timeout=9", "train.py"]
    assert parse_options(argv, None).rdzv_conf == "takeover_timeout=45,takeover_timeout=9", "the later wins"
