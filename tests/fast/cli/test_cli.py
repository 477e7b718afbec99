"""The frame of the command line: help without heavy imports, near misses, errors as one line and an exit code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from unittest.mock import Mock

import pytest

import edl
from edl.cli import explain_missing, find_commands, main
from edl.cli.master import default_host, warn_of_open_port
from edl.cli.output import show_looks
from edl.command_line import CommandParser, duration, parse_duration, port
from edl.errors import DiscoveryError, SettingsError
from edl.settings import Credentials

AddCommand = Callable[[str, str], None]
HEAVY = ("torch", "paddle", "numpy", "grpc", "google.protobuf", "rich", "sqlite3", "sklearn", "edl_serving")


@pytest.fixture
def add_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AddCommand:
    """Installs a package that offers the command NAME with a body of `main(argv)`."""

    def add(name: str, body: str) -> None:
        module = f"offered_{name}"
        source = f'"""`edl {name}`: offered by another package."""\n\ndef main(argv):\n    {body}\n'
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[edl.commands]\n{name} = {module}:main\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, module, raising=False)

    monkeypatch.delenv("EDL_TRACEBACK", raising=False)
    return add


def test_help_names_every_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, command in find_commands().items():
        summary = command.summary
        assert f"  {name}" in text
        assert summary in text
        assert len(summary) < 100
        for option, most in (("--help", 60), ("--help-all", 1000)):
            with pytest.raises(SystemExit) as stop:
                main([name, option])
            assert stop.value.code == 0
            shown = capsys.readouterr().out
            assert shown.startswith(f"usage: edl {name}")
            assert shown.count("\n") <= most, "the usual options fit a screen"
        assert main([name, "--halp"]) == 2
        assert "did you mean '--help'" in capsys.readouterr().err, "an option's near miss is named before all else"
    assert max(map(len, text.splitlines())) <= 110
    assert main([]) == 2
    assert "usage: edl" in capsys.readouterr().out, "without a command the help is shown"
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"edl {edl.__version__}\n"


@pytest.mark.parametrize("command", ["", "serve", "register"])
def test_help_needs_no_packages(command: str) -> None:
    code = (
        "import sys; sys.modules['grpc_health'] = None\nfrom edl.cli import main\ntry: main(sys.argv[1:])\n"
        f"finally: print('heavy:', [m for m in {HEAVY} if m in sys.modules])"
    )
    arguments = [command, "-h"] if command else ["-h"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout if command else done.stdout.endswith("heavy: []\n")


@pytest.mark.parametrize(("typed", "meant"), [("techers", "teachers"), ("SERVE", "serve"), ("regsiter", "register")])
def test_mistyped_command_gets_a_suggestion(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([typed]) == 2
    error = capsys.readouterr().err
    assert f"did you mean '{meant}'" in error
    assert main(["zzzzzz"]) == 2
    assert "teachers" in capsys.readouterr().err, "the known ones are listed"
    assert error.count("\n") == 1


def test_another_package_adds_a_command(add_command: AddCommand, capsys: pytest.CaptureFixture[str]) -> None:
    add_command("greet", "print('hello', *argv)")
    assert main(["greet", "you"]) == 0
    assert main(["help", "greet"]) == 0
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("hello you\nhello --help\n")
    assert "(offered_greet:main)" in out
    add_command("teachers", "raise AssertionError")
    assert find_commands()["teachers"].target == "edl.cli.teachers", "own commands cannot be replaced"


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("from edl.errors import NoTeacherError; raise NoTeacherError('nobody\\'s there')", 1, "nobody's there"),
        ("from edl.errors import SettingsError; raise SettingsError('port=-1: ...')", 2, "port=-1"),
        ("from edl.errors import DiscoveryError; raise DiscoveryError()", 75, "DiscoveryError"),
        ("import a_module_that_is_not_there", 1, "'a_module_that_is_not_there' is not installed"),
        ("raise KeyboardInterrupt", 130, ""),
        ("return 7", 7, ""),
    ],
)
def test_error_is_one_line_and_a_code(
    body: str,
    code: int,
    words: str,
    add_command: AddCommand,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_command("fail", body)
    assert main(["fail"]) == code
    error = capsys.readouterr().err
    assert words in error
    assert error == "" or (error.startswith("edl fail: ") and error.count("\n") == 1)
    monkeypatch.setenv("EDL_TRACEBACK", "1")
    if words:
        with pytest.raises((edl.errors.EDLError, ModuleNotFoundError)):
            main(["fail"])


def test_a_bug_is_not_disguised(add_command: AddCommand) -> None:
    add_command("fail", "return 1 / 0")
    with pytest.raises(ZeroDivisionError):
        main(["fail"])


def test_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    told = explain_missing(ModuleNotFoundError("", name="sklearn.datasets"))
    assert told is not None
    assert "pip install scikit-learn" in told
    assert "[demo]" in told
    assert explain_missing(ModuleNotFoundError("", name="edl.gone")) is None


def test_a_reader_that_goes_away_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "edl", "--help"], stdout=write_end, stderr=subprocess.PIPE, timeout=60, check=False
        )
    finally:
        os.close(write_end)
    assert done.stderr == b""
    assert done.returncode == 141


def test_outage_does_not_end_a_watch(capsys: pytest.CaptureFixture[str]) -> None:
    for to_json in (None, str):
        answers = [1, 1, DiscoveryError("no\x1b answer"), DiscoveryError("no\x1b answer"), 1, 2]

        def read(answers: list[int | DiscoveryError] = answers) -> int:
            if isinstance(answer := answers.pop(0), DiscoveryError):
                raise answer
            return answer

        show_looks(read, str, to_json, 80, every_s=0.0, is_over=lambda look: look == 2)
        said, trouble = capsys.readouterr(), "last known state: no\ufffd answer"
        lines = said.out.splitlines()
        if to_json is None:
            assert all(datetime.fromisoformat(lines.pop(at)).tzinfo for at in (7, 5, 2, 0)), "each look below its time"
        shown = (["1", "1", trouble, "1", "2"], []) if to_json is None else (["1", "1", "2"], [trouble])
        assert (lines, said.err.splitlines()) == shown
    with pytest.raises(SettingsError, match="deleted"):
        show_looks(Mock(side_effect=[1, SettingsError("deleted")]), str, None, 80, every_s=0.0)


def test_default_host_reaches_other_workers() -> None:
    assert default_host("sqlite:////tmp/store.sqlite") == "127.0.0.1"
    assert default_host("consul://10.0.0.7:8500") == "::", "all addresses, IPv6 and IPv4"


def test_open_port_is_said(caplog: pytest.LogCaptureFixture) -> None:
    for host in ("::", "0.0.0.0", "10.0.0.7"):
        caplog.clear()
        warn_of_open_port(host, Credentials())
        assert f"listens on {host} without a token" in caplog.text
    caplog.clear()
    warn_of_open_port("::", Credentials(cert="c.pem", key="k.pem"))
    assert caplog.text, "TLS alone lets anyone in"
    caplog.clear()
    for host in ("127.0.0.1", "::1", "localhost"):
        warn_of_open_port(host, Credentials())
    warn_of_open_port("::", Credentials(token_file="tokens"))
    warn_of_open_port("::", Credentials(ca="ca.pem", cert="c.pem", key="k.pem"))
    assert not caplog.text


@pytest.mark.parametrize(
    ("text", "seconds"), [("5ms", 0.005), ("3s", 3.0), ("1.5m", 90.0), ("2min", 120.0), ("1h", 3600.0), ("7", 7.0)]
)
def test_durations_have_units(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)
    for wrong in ("", "3 weeks", "-1s", "nan", "inf", "1e3s"):
        with pytest.raises(ValueError, match="with a unit"):
            parse_duration(wrong)


def parse(*arguments: str) -> object:
    parser = CommandParser("edl test", "")
    parser.add_store_option()
    parser.add_argument("--port", type=port)
    parser.add_argument("-w", "--wait", "--seconds", type=duration(0.5, 60))
    parser.add_argument("--time", type=duration(0, 3600))
    parser.add_argument("--kind", choices=("reader", "writer"))
    parser.add_advanced_group("more").add_argument("--rare")
    return parser.parse_args(arguments)


def test_values_are_checked() -> None:
    found = vars(parse("--discovery", "edl://a:1", "--store", "edl://a:1", "--wait", "500ms", "--port", "0"))
    assert (found["store"], found["wait"], found["port"]) == ("edl://a:1", 0.5, 0)
    for arguments, words in (
        (("--discovery", "edl://a:1", "--store", "edl://b:1"), "--store edl://b:1: edl://a:1 was already given"),
        (("--wait=61s",), "--wait 61s: expected a duration from 0.5s to 60s"),
        (("--time", "0"), "--time 0: expected a duration above 0 to 3600s"),
        (("--kind", "raeder"), "--kind 'raeder': expected reader, writer; did you mean 'reader'?"),
        (("--port", "65536"), "--port 65536: expected a port"),
        (("--rar", "1"), "unknown option '--rar'; did you mean '--rare'"),
        (("--token=SECRET",), "unknown option '--token'"),
        (("word",), "unknown argument 'word'"),
    ):
        with pytest.raises(SettingsError, match=re.escape(words)) as caught:
            parse(*arguments)
        assert "SECRET" not in str(caught.value)
