"""Settings of `edl serve`, of a server and its model: flags, files, and what is wrong with them in words."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edl.command_line import CommandParser
from edl.discovery.served.addresses import outward_address
from edl.errors import SettingsError
from edl_serving import ServerSettings, TeacherServer, TensorSpec
from edl_serving import options as values
from edl_serving.backends.backend import cast_to_spec, parse_spec, parse_specs
from edl_serving.backends.source import import_target
from edl_serving.options import add_flags, read_file
from edl_serving.options import values as merged
from edl_serving.request_error import RequestError
from edl_serving.serve_config import GROUPS, ServeConfig
from tests.fast.serving.fakes import FakeBackend, X, model_of

LEAST = ["--callable", "m:f", "--model", "digits"]


def config_of(*arguments: str, file: str | None = None, folder: Path | None = None) -> ServeConfig:
    parser = CommandParser("edl serve", "", "")
    add_flags(parser, GROUPS)
    flags = vars(parser.parse_args(arguments))
    if file is None:
        return ServeConfig.of(merged(GROUPS, flags, {}))
    assert folder is not None
    path = folder / "teacher.toml"
    path.write_text(file)
    return ServeConfig.of(merged(GROUPS, flags, read_file(str(path)), "teacher.toml"))


def test_names_and_addresses_have_defaults() -> None:
    assert config_of("--callable", "m:f", "--service", "s").server.model == "s"
    config = config_of("--callable", "m:f", "--service", "s", "--model", "m")
    assert (config.server.model, config.registration.service) == ("m", "s")
    assert config_of(*LEAST, "--host", "[::1]").address == "::1"
    assert config_of(*LEAST, "--host", "0.0.0.0", "--advertise", "t.example").address == "t.example"
    everywhere = config_of(*LEAST, "--host", "0.0.0.0").address
    assert everywhere == outward_address([])
    assert everywhere not in ("", "0.0.0.0")


def test_tokens_are_rows_of_a_batch() -> None:
    hf = ("--hf", "folder", "--model", "m", "--task")
    config = config_of(*hf, "masked-lm", "--max-tokens", "2048", "--top-k", "8")
    assert (config.server.max_batch_rows, config.source.max_tokens, config.source.top_k) == (2048, 2048, 8)
    for more, rows, queue in (((*hf, "causal-lm"), 8192, 32768), ((*hf, "sequence-classification"), 64, 1024)):
        config = config_of(*more)
        assert (config.server.max_batch_rows, config.server.max_queue_rows) == (rows, queue)


FLAGS = """
--factory f.py:g --model m --option width=512 --option kind=wide --input x:float32[4] --input y:int64
--max-delay 5ms --max-queue 99 --max-message 4MiB --drain-timeout 1.5m --no-check-nan --port 8001 --capacity 2.5
--tag a --tag b --meta rack=r7
"""

FILE = """
factory = "f.py:g"
model = "m"
input = ["x:float32[4]", "y:int64"]
max-delay = "5ms"
max_queue = 99
max-message = "4MiB"
drain-timeout = "1.5m"
check-nan = false
port = 8001
capacity = 2.5
tag = ["a", "b"]
[option]
width = 512
kind = "wide"
[meta]
rack = "r7"
"""


def test_a_file_says_the_same_as_the_flags(tmp_path: Path) -> None:
    from_flags = config_of(*FLAGS.split())
    assert config_of(file=FILE, folder=tmp_path) == from_flags
    assert from_flags.source.options == {"width": 512, "kind": "wide"}
    server = from_flags.server
    assert (server.max_delay_s, server.drain_timeout_s, server.max_message_bytes) == (0.005, 90, 4 << 20)
    assert server.check_nan is False
    assert from_flags.registration.meta == {"rack": "r7"}


def test_flags_win_and_pairs_are_joined(tmp_path: Path) -> None:
    config = config_of("--port", "1", "--option", "width=1", "--tag", "c", "--check-nan", file=FILE, folder=tmp_path)
    assert config.server.port == 1
    assert config.server.check_nan is True
    assert config.registration.tags == ("c",)
    assert config.source.options == {"width": 1, "kind": "wide"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "pass exactly one of --callable, --factory"),
        (["--callable", "m:f"], "name the service: --service NAME"),
        ([*LEAST, "--paddle", "p"], "got --callable and --paddle"),
        ([*LEAST, "--max-batch", "many"], "--max-batch 'many': expected a whole number"),
        ([*LEAST, "--max-batch", "64", "--max-queue", "8"], "max_queue_rows=8"),
        ([*LEAST, "--meta", "rack"], "--meta 'rack': expected key=value"),
        ([*LEAST, "--maxbatch", "8"], "unknown option '--maxbatch'; did you mean '--max-batch'"),
        ([*LEAST, "--metrics-host", "0.0.0.0"], "--metrics-host requires --metrics-port"),
        ([*LEAST, "--service", "two words"], "service 'two words'"),
        ([*LEAST, "--ttl", "1ms"], "ttl_s=0.001"),
        ([*LEAST, "--tls-cert", "a.pem"], "a TLS certificate without its key"),
        (["--hf", "folder", "--model", "m", "--max-batch", "8"], "rows of --hf are tokens: give --max-tokens"),
        ([*LEAST, "--host", "0.0.0.0", "--token-file", "a"], "tokens without TLS on 0.0.0.0"),
    ],
)
def test_wrong_flags_are_named(arguments: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)):
        config_of(*arguments)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("maxbatch = 8", "teacher.toml: unknown setting 'maxbatch'; did you mean 'max-batch'"),
        ("max-batch = 8.5", "teacher.toml: max-batch = 8.5: expected a whole number"),
        ("tag = 'gpu'", "teacher.toml: tag = 'gpu': expected a list"),
        ("meta = 'x=y'", "teacher.toml: meta = 'x=y': expected a table"),
        ("model = ", "is not TOML: "),
    ],
)
def test_wrong_files_are_named(file: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)):
        config_of("--callable", "m:f", file=file, folder=tmp_path)
    with pytest.raises(SettingsError, match=r"--config .*nowhere.toml'?: No such file"):
        read_file(str(tmp_path / "nowhere.toml"))


def test_discovery_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDL_DISCOVERY", "consul://c:8500")
    monkeypatch.setenv("EDL_TTL_S", "4")
    for arguments, expected in (
        ((), ("consul://c:8500", 4)),
        (("--ttl", "5s"), ("consul://c:8500", 5)),
        (("--discovery", "none", "--service", "any thing"), (None, 4)),
    ):
        registration = config_of(*LEAST, *arguments).registration
        assert (registration.url, registration.ttl_s) == expected


VALUES = [
    (values.duration_s, ["5ms", "250us", "2s", "1.5m", "1h", ".5s", "0"], [0.005, 0.00025, 2, 90, 3600, 0.5, 0]),
    (values.duration_s, ["5", "-5ms", "ms", "", "5 parsecs", 5, None, True, "1e3s"], "expected a duration"),
    (values.size_bytes, ["4MiB", "1GiB"], [4 << 20, 1 << 30]),
    (values.size_bytes, ["512", "-1MiB", 512], "expected a size with a unit"),
    (values.count, ["8", 8], [8, 8]),
    (values.count, ["0", "-1", "8.5", True], "expected a whole number above 0"),
    (values.port, ["0", 65535], [0, 65535]),
    (values.port, ["70000", -1], "expected a port"),
    (values.number, ["nan", "0", "-1", "inf"], "expected a number above 0"),
    (values.flag, ["no", 1], "expected true or false"),
    (values.user, ["root", "7", 7], [0, 7, 7]),
    (values.user, ["no such user", -1], "expected a user of this system"),
    (values.text, ["", 3], "expected text"),
    (values.json_or_text, ["3", "true", "[1, 2]", "wide", "1e-3", '"3"', 3], [3, True, [1, 2], "wide", 1e-3, "3", 3]),
]


@pytest.mark.parametrize(("parse", "given_", "found"), VALUES)
def test_single_values(parse: Callable[[Any], Any], given_: list[Any], found: list[Any] | str) -> None:
    for number, raw in enumerate(given_):
        if isinstance(found, list):
            assert parse(raw) == pytest.approx(found[number])
        else:
            with pytest.raises(ValueError, match=found):
                parse(raw)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("image:uint8[3,224,224]", TensorSpec("image", "UINT8", (3, 224, 224))),
        ("x:float16 [ ?, 4 ]", TensorSpec("x", "FP16", (-1, 4))),
        ("label:int64", TensorSpec("label", "INT64", ())),
        ("words:str", TensorSpec("words", "BYTES", ())),
        ("serving_default:0:float32[2]", TensorSpec("serving_default:0", "FP32", (2,))),
        ("x", None),
        ("x:float32[a]", None),
        ("x:complex64[4]", None),
    ],
)
def test_specs_have_name_type_and_shape(text: str, spec: TensorSpec | None) -> None:
    if spec is not None:
        assert parse_spec(text) == spec
        with pytest.raises(SettingsError, match="is given twice"):
            parse_specs([text, text])
    else:
        with pytest.raises(SettingsError, match=r"tensor"):
            parse_spec(text)


def test_answers_are_cast_within_rounding() -> None:
    spec = TensorSpec("y", "FP32", (2,))
    assert cast_to_spec(spec, [[1, 2]]).dtype == "float32"
    with pytest.raises(TypeError, match="'y' is float32, which cannot be cast to INT64"):
        cast_to_spec(TensorSpec("y", "INT64", (1,)), cast_to_spec(spec, [[1.5]]))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("math", "expected package.module:name or path/file.py:name"),
        ("math:sqroot", "math has no 'sqroot'; did you mean 'sqrt'"),
        ("nowhere.at.all:f", "there is no module 'nowhere'"),
        ("nowhere.py:f", "file 'nowhere.py' does not exist"),
        ("needs_more:f", "'needs_more' imports 'surely_not_installed', which is not installed"),
    ],
)
def test_targets_that_do_not_exist_are_named(
    target: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import surely_not_installed")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SettingsError, match=re.escape(words)):
        import_target(target, "--callable")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: ServerSettings(""), "model=''"),
        (lambda: ServerSettings("m", max_batch_rows=0), "max_batch_rows=0"),
        (lambda: ServerSettings("m", max_batch_rows=65, max_queue_rows=64), "max_queue_rows=64"),
        (lambda: ServerSettings("m", max_message_bytes=2**31), f"max_message_bytes={2**31}"),
        (lambda: TensorSpec("", "FP32"), "name"),
        (lambda: TensorSpec("x", "FLOAT"), "'x'.*'FLOAT'"),
        (lambda: TensorSpec("x", "FP32", (3, -2)), "'x'.*dimension of size -2"),
    ],
)
def test_impossible_settings_are_named(made: Callable[[], object], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        made()


@pytest.mark.parametrize(
    ("backends", "said"),
    [
        ([], "at least one"),
        ([FakeBackend(), FakeBackend(outputs=(X,))], "differ"),
        ([FakeBackend(inputs=())], "no inputs"),
        ([FakeBackend(outputs=())], "no outputs"),
        ([FakeBackend(inputs=(X, X))], "two inputs"),
        ([FakeBackend(outputs=(TensorSpec("y", "BF16"),))], "'y' is BF16"),
    ],
)
def test_unservable_backends_are_refused(backends: list[FakeBackend], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        TeacherServer(ServerSettings(model="m"), backends)


def test_an_unknown_version_is_not_listed() -> None:
    backend = FakeBackend()
    backend.version = ""
    model = model_of(backend)
    assert list(model.metadata().versions) == []
    model.check_request("m", "")
    with pytest.raises(RequestError, match="because its version is unknown"):
        model.check_request("m", "1")


def test_limits_follow_the_largest_message() -> None:
    large = ServerSettings(model="m", max_message_bytes=2**31 - 1)
    assert large.max_queue_bytes == large.max_client_bytes == 2 * (2**31 - 1), "two of them have room"
    assert ServerSettings(model="m").max_queue_bytes == 1 << 30
    with pytest.raises(SettingsError, match=r"smaller than a message.*--max-client-bytes, --max-message"):
        ServerSettings(model="m", max_client_bytes=1 << 20)
