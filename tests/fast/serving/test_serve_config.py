"""Settings of `edl serve` and `edl register`: flags, files, and what is wrong with them in words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.discovery import Instance, open_registry
from edl.errors import SettingsError
from edl_serving import TensorSpec
from edl_serving.backends.specs import cast_to_spec, parse_spec, parse_specs, select_outputs
from edl_serving.backends.target import import_target
from edl_serving.cmd_register import parse_endpoint
from edl_serving.command_line import option_values as values
from edl_serving.command_line.options import add_flags, read_file
from edl_serving.command_line.options import values as merged
from edl_serving.command_line.parser import CommandParser
from edl_serving.command_line.serve_config import GROUPS, ServeConfig
from edl_serving.registration.address import is_loopback, outward_address, warn_of_loopback
from edl_serving.registration.probe import ProbeStatus, ReadinessTracker, RegistryAction
from edl_serving.registration.reconciler import InstanceReconciler

LEAST = ["--callable", "m:f", "--model", "digits"]


def config_of(*arguments: str, file: str | None = None, folder: Path | None = None) -> ServeConfig:
    parser = CommandParser("edl serve", "", "")
    add_flags(parser, GROUPS)
    flags = vars(parser.parse(arguments))
    if file is None:
        return ServeConfig.of(merged(GROUPS, flags, {}))
    assert folder is not None
    path = folder / "teacher.toml"
    path.write_text(file)
    return ServeConfig.of(merged(GROUPS, flags, read_file(str(path)), "teacher.toml"))


def test_two_flags_are_enough() -> None:
    config = config_of(*LEAST)
    assert (config.server.model, config.registration.service) == ("digits", "digits")
    assert (config.server.host, config.server.port, config.address) == ("127.0.0.1", 0, "127.0.0.1")
    assert config.registration.url is not None
    assert config.registration.url.startswith("sqlite:///")
    assert config.server.metrics_port is None


def test_model_and_service_default_mutually() -> None:
    assert config_of("--callable", "m:f", "--service", "s").server.model == "s"
    config = config_of("--callable", "m:f", "--service", "s", "--model", "m")
    assert (config.server.model, config.registration.service) == ("m", "s")


def test_tokens_are_rows_of_a_batch() -> None:
    config = config_of("--hf", "folder", "--model", "m", "--task", "causal-lm")
    assert (config.server.max_batch_rows, config.server.max_queue_rows) == (8192, 32768)
    config = config_of("--hf", "folder", "--model", "m", "--task", "masked-lm", "--max-tokens", "2048", "--top-k", "8")
    assert (config.server.max_batch_rows, config.source.max_tokens, config.source.top_k) == (2048, 2048, 8)
    texts = config_of("--hf", "folder", "--model", "m", "--task", "sequence-classification", "--max-batch", "16")
    assert (texts.server.max_batch_rows, texts.server.max_queue_rows) == (16, 1024)


FLAGS = [
    *("--factory", "f.py:g", "--model", "m", "--service", "s", "--option", "width=512", "--option", "kind=wide"),
    *("--input", "x:float32[4]", "--input", "y:int64", "--output", "z", "--model-version", "7"),
    *(
        "--max-batch",
        "8",
        "--max-delay",
        "5ms",
        "--max-queue",
        "99",
        "--max-message",
        "4MiB",
        "--drain-timeout",
        "1.5m",
    ),
    *("--linger", "0", "--no-check-nan", "--port", "8001", "--metrics-port", "0", "--capacity", "2.5"),
    *("--tag", "a", "--tag", "b", "--meta", "rack=r7", "--ttl", "3s", "--discovery", "consul://c:8500"),
    *("--advertise", "t1.example", "--id", "t1", "--ready-file", "r", "--exit-with", "7"),
]
FILE = """
factory = "f.py:g"
model = "m"
service = "s"
input = ["x:float32[4]", "y:int64"]
output = ["z"]
model_version = "7"
max-batch = 8
max-delay = "5ms"
max_queue = 99
max-message = "4MiB"
drain-timeout = "1.5m"
linger = 0
check-nan = false
port = 8001
metrics-port = 0
capacity = 2.5
tag = ["a", "b"]
ttl = "3s"
discovery = "consul://c:8500"
advertise = "t1.example"
id = "t1"
ready-file = "r"
exit-with = 7
[option]
width = 512
kind = "wide"
[meta]
rack = "r7"
"""


def test_a_file_says_the_same_as_the_flags(tmp_path: Path) -> None:
    from_flags = config_of(*FLAGS)
    assert config_of(file=FILE, folder=tmp_path) == from_flags
    assert from_flags.source.options == {"width": 512, "kind": "wide"}
    assert from_flags.server.max_delay_s == 0.005
    assert from_flags.server.drain_timeout_s == 90
    assert from_flags.server.max_message_bytes == 4 << 20
    assert from_flags.server.check_nan is False
    assert from_flags.registration.meta == {"rack": "r7"}


def test_options_stand_in_files_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    parser = CommandParser("edl serve", "", "")
    add_flags(parser, GROUPS)
    with pytest.raises(SystemExit):
        parser.parse(["--help"])
    shown = capsys.readouterr().out
    for option in (option for group in GROUPS for option in group.options if not option.refused):
        assert f"--{option.name} " in shown or f"--{option.name}," in shown, option.name
        assert option.help


def test_flags_win_and_pairs_are_joined(tmp_path: Path) -> None:
    config = config_of("--port", "1", "--option", "width=1", "--tag", "c", "--check-nan", file=FILE, folder=tmp_path)
    assert config.server.port == 1
    assert config.server.check_nan is True
    assert config.registration.tags == ("c",)
    assert config.source.options == {"width": 1, "kind": "wide"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give the model by one of --callable, --factory"),
        (["--callable", "m:f"], "name the model: --model NAME"),
        ([*LEAST, "--paddle", "p"], "got --callable and --paddle"),
        ([*LEAST, "--max-batch", "0"], "--max-batch '0': expected a whole number above 0"),
        ([*LEAST, "--max-batch", "many"], "--max-batch 'many': expected a whole number"),
        ([*LEAST, "--max-batch", "64", "--max-queue", "8"], "max_queue_rows=8"),
        ([*LEAST, "--max-delay", "5"], "--max-delay '5': expected a duration with its unit, as in 5ms"),
        ([*LEAST, "--max-message", "512"], "--max-message '512': expected a size with its unit"),
        ([*LEAST, "--port", "70000"], "--port '70000': expected a port"),
        ([*LEAST, "--port"], "argument --port: expected one argument"),
        ([*LEAST, "--meta", "rack"], "--meta 'rack': expected key=value"),
        ([*LEAST, "--capacity", "nan"], "--capacity 'nan': expected a number above 0"),
        ([*LEAST, "--maxbatch", "8"], "unknown option '--maxbatch'; did you mean '--max-batch'"),
        ([*LEAST, "--max", "8"], "unknown option '--max'"),
        ([*LEAST, "digits"], "unknown argument 'digits'; --help lists all"),
        ([*LEAST, "--metrics-host", "0.0.0.0"], "--metrics-host means nothing without --metrics-port"),
        ([*LEAST, "--service", "two words"], "service 'two words'"),
        ([*LEAST, "--ttl", "1ms"], "ttl_s=0.001"),
        ([*LEAST, "--meta", "state=x"], "meta key 'state'"),
        ([*LEAST, "--tag", "a\nb"], "tag 'a\\nb'"),
        ([*LEAST, "--token", "secret"], "--token: expected --token-file with a path: a token on the command line"),
        ([*LEAST, "--tls-cert", "a.pem"], "a TLS certificate without its key"),
        (["--hf", "folder", "--model", "m", "--max-batch", "8"], "rows of --hf are tokens: give --max-tokens"),
        (["--hf", "folder", "--model", "m", "--top-k", "0"], "--top-k '0': expected a whole number above 0"),
        (
            [*LEAST, "--host", "0.0.0.0", "--token-file", "a"],
            "tokens without TLS on 0.0.0.0",
        ),
    ],
)
def test_wrong_flags_are_named(arguments: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)):
        config_of(*arguments)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("maxbatch = 8", "teacher.toml: there is no setting 'maxbatch'; did you mean 'max-batch'"),
        ("max-batch = 8.5", "teacher.toml: max-batch = 8.5: expected a whole number"),
        ("max-batch = true", "teacher.toml: max-batch = True: expected a whole number"),
        ("max-delay = 5", "teacher.toml: max-delay = 5: expected a duration with its unit"),
        ("check-nan = 'no'", "teacher.toml: check-nan = 'no': expected true or false"),
        ("tag = 'gpu'", "teacher.toml: tag = 'gpu': expected a list"),
        ("meta = 'x=y'", "teacher.toml: meta = 'x=y': expected a table"),
        ("meta = {x = 1}", "teacher.toml: meta = {'x': 1}: expected text"),
        ("model = ''", "teacher.toml: model = '': expected text"),
        ("[server]\nport = 1", "teacher.toml: there is no setting 'server'"),
        ("model = ", "is not TOML: "),
    ],
)
def test_wrong_files_are_named(file: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)):
        config_of("--callable", "m:f", file=file, folder=tmp_path)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--config .*nowhere.toml'?: No such file"):
        read_file(str(tmp_path / "nowhere.toml"))


def test_discovery_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDL_DISCOVERY", "consul://c:8500")
    monkeypatch.setenv("EDL_TTL_S", "4")
    assert config_of(*LEAST).registration.url == "consul://c:8500"
    assert config_of(*LEAST).registration.ttl_s == 4
    assert config_of(*LEAST, "--ttl", "5s").registration.ttl_s == 5
    assert config_of(*LEAST, "--discovery", "none").registration.url is None
    assert config_of(*LEAST, "--discovery", "none", "--service", "any thing").registration.url is None


def test_ids_depend_on_the_port() -> None:
    settings = config_of(*LEAST).registration
    first, again, other = (settings.instance("h", port, "m", {}).id for port in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        ([], "127.0.0.1"),
        (["--host", "[::1]"], "::1"),
        (["--host", "10.1.2.3"], "10.1.2.3"),
        (["--host", "0.0.0.0", "--advertise", "t.example"], "t.example"),
    ],
)
def test_the_listened_address_is_advertised(arguments: list[str], address: str) -> None:
    assert config_of(*LEAST, *arguments).address == address


def test_listening_everywhere_advertises() -> None:
    address = config_of(*LEAST, "--host", "0.0.0.0").address
    assert address == outward_address(None)
    assert address not in ("", "0.0.0.0")
    assert is_loopback("localhost")
    assert is_loopback("[::1]")
    assert not is_loopback("10.0.0.1")


@pytest.mark.parametrize("url", ["consul://c:8500", "etcd://e:2379,f:2379"])
def test_loopback_is_of_no_use_in_a_cluster(url: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_loopback(url, "127.0.0.1", "--host ADDRESS")
    assert "only students on this host" in caplog.text


# Single values.


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5ms", 0.005), ("250us", 0.00025), ("2s", 2), ("1.5m", 90), ("1h", 3600), (".5s", 0.5), ("0", 0)],
)
def test_durations_carry_their_unit(text: str, seconds: float) -> None:
    assert values.duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("raw", ["5", "-5ms", "ms", "", "5 parsecs", 5, None, True, "1e3s", "nans"])
def test_durations_without_one_are_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match="expected a duration"):
        values.duration_s(raw)


@given(st.one_of(st.text(), st.integers(), st.floats(), st.none(), st.booleans(), st.lists(st.integers())))
def test_any_value_is_read_or_refused(raw: Any) -> None:
    for parse in (
        values.text,
        values.flag,
        values.count,
        values.port,
        values.number,
        values.duration_s,
        values.size_bytes,
    ):
        try:
            parse(raw)
        except ValueError as exc:
            assert "expected" in str(exc)  # noqa: PT017 - either way is right


def test_factory_options_are_json_or_text() -> None:
    read = values.json_or_text
    assert [read(raw) for raw in ("3", "true", "[1, 2]", "wide", "1e-3", '"3"', 3)] == [
        3,
        True,
        [1, 2],
        "wide",
        1e-3,
        "3",
        3,
    ]


# Tensors.


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("image:uint8[3,224,224]", TensorSpec("image", "UINT8", (3, 224, 224))),
        ("x:FP32[-1]", TensorSpec("x", "FP32", (-1,))),
        ("x : float16 [ ?, 4 ]", None),
        ("x:float16 [ ?, 4 ]", TensorSpec("x", "FP16", (-1, 4))),
        ("label:int64", TensorSpec("label", "INT64", ())),
        ("words:BYTES[?]", TensorSpec("words", "BYTES", (-1,))),
        ("words:str", TensorSpec("words", "BYTES", ())),
        ("flag:bool[]", TensorSpec("flag", "BOOL", ())),
        ("serving_default:0:float32[2]", TensorSpec("serving_default:0", "FP32", (2,))),
        ("x:bf16[4]", TensorSpec("x", "BF16", (4,))),
        ("x", None),
        ("x:float32[4", None),
        ("x:float32[a]", None),
        ("x:float32[0]", None),
        ("x:complex64[4]", None),
        (":float32[4]", None),
        ("", None),
    ],
)
def test_specs_have_name_type_and_shape(text: str, spec: TensorSpec | None) -> None:
    if spec is not None:
        assert parse_spec(text) == spec
    else:
        with pytest.raises(SettingsError, match=r"tensor"):
            parse_spec(text)


def test_a_name_is_given_once() -> None:
    with pytest.raises(SettingsError, match="'x' is given twice"):
        parse_specs(["x:float32", "x:int64"])


def test_answers_are_cast_within_rounding() -> None:
    spec = TensorSpec("y", "FP32", (2,))
    assert cast_to_spec(spec, [[1, 2]]).dtype == "float32"
    with pytest.raises(TypeError, match="'y' is float32, which does not become INT64"):
        cast_to_spec(TensorSpec("y", "INT64", (1,)), cast_to_spec(spec, [[1.5]]))


def test_outputs_by_name_or_by_order() -> None:
    assert select_outputs({"a": 1, "b": 2}, ["b"])["b"] == 2
    assert select_outputs({"output_0": 1, "output_1": 2}, ["logits"]) == {"logits": 1}
    assert select_outputs({"output": 1}, ["logits"]) == {"logits": 1}
    with pytest.raises(ValueError, match="answers 'a', 'b'; wanted are 'logits'"):
        select_outputs({"a": 1, "b": 2}, ["logits"])
    with pytest.raises(ValueError, match="wanted are 'x', 'y'"):
        select_outputs({"output": 1}, ["x", "y"])


# What a target names.


def test_targets_are_modules_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 41")
    (tmp_path / "teacher_in_a_file.py").write_text("import beside\nclass Box:\n    value = beside.VALUE + 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert import_target("teacher_in_a_file.py:Box.value", "--callable") == 42
    assert import_target(f"{tmp_path}/teacher_in_a_file.py:Box.value", "--callable") == 42
    assert import_target("teacher_in_a_file:Box.value", "--callable") == 42


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("math", "expected package.module:name or path/file.py:name"),
        ("math:", "expected package.module:name"),
        ("math:sqroot", "math has no 'sqroot'; did you mean 'sqrt'"),
        ("nowhere.at.all:f", "there is no module 'nowhere'"),
        ("nowhere.py:f", "there is no file 'nowhere.py'"),
        ("math:pi.real.nothing", "math.pi.real has no 'nothing'"),
    ],
)
def test_targets_that_do_not_exist_are_named(target: str, words: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)):
        import_target(target, "--callable")


def test_missing_imports_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import surely_not_installed")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SettingsError, match="'needs_more' imports 'surely_not_installed', which is not installed"):
        import_target("needs_more:f", "--callable")


# Registering for another server.


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("host:8001", ("host", 8001)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[::1]:8001", ("::1", 8001)),
        ("unix:/run/x.sock", ("unix:/run/x.sock", 0)),
        ("host", None),
        ("host:", None),
        (":8001", None),
        ("host:0", None),
        ("host:65536", None),
        ("::1:8001", None),
        ("http://host:8001", None),
        ("unix:relative", None),
    ],
)
def test_endpoints(text: str, parsed: tuple[str, int] | None) -> None:
    if parsed is not None:
        assert parse_endpoint("ENDPOINT", text) == parsed
    else:
        with pytest.raises(SettingsError, match="expected host:port"):
            parse_endpoint("ENDPOINT", text)


def test_silence_counts_and_a_no_is_final() -> None:
    prober = ReadinessTracker(failures=3)
    silent, yes, no = ProbeStatus.NO_ANSWER, ProbeStatus.READY, ProbeStatus.NOT_READY
    story = [
        (silent, RegistryAction.KEEP),
        (yes, RegistryAction.REGISTER),
        (silent, RegistryAction.KEEP),
        (silent, RegistryAction.KEEP),
        (yes, RegistryAction.KEEP),
        (silent, RegistryAction.KEEP),
        (silent, RegistryAction.KEEP),
        (silent, RegistryAction.DEREGISTER),
        (silent, RegistryAction.KEEP),
        (yes, RegistryAction.REGISTER),
        (no, RegistryAction.DEREGISTER),
        (silent, RegistryAction.KEEP),
        (yes, RegistryAction.REGISTER),
    ]
    assert [prober.record_probe(answer) for answer, _ in story] == [turn for _, turn in story]


@given(st.lists(st.sampled_from(ProbeStatus)), st.integers(1, 4))
def test_registry_actions_alternate(answers: list[ProbeStatus], failures: int) -> None:
    prober = ReadinessTracker(failures)
    turns = []
    for answer in answers:
        turn = prober.record_probe(answer)
        assert turn is not RegistryAction.REGISTER or answer is ProbeStatus.READY
        assert answer is not ProbeStatus.NOT_READY or not prober.registered
        if turn is not RegistryAction.KEEP:
            turns.append(turn)
    assert turns == ([RegistryAction.REGISTER, RegistryAction.DEREGISTER] * len(turns))[: len(turns)]


def test_a_registry_s_refusal_is_raised(tmp_path: Path) -> None:
    reconciler = InstanceReconciler(f"sqlite:///{tmp_path}/d.sqlite", 2.0)
    try:
        registration = config_of(*LEAST, "--discovery", "none", "--service", "not a name").registration
        reconciler.set_desired(registration.instance("127.0.0.1", 1, "m", {}))
        with pytest.raises(SettingsError, match="not a name"):
            reconciler.wait_until_current(10)
    finally:
        reconciler.close()


def test_two_teachers_of_one_id_are_told_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = f"sqlite:///{tmp_path}/d.sqlite"
    for port, warned in ((8500, False), (8501, True)):
        with open_registry(url) as registry, registry.register(Instance("digits", "one", "127.0.0.1", 8500)):
            reconciler = InstanceReconciler(url, 2.0)
            reconciler.set_desired(Instance("digits", "one", "127.0.0.1", port))
            assert reconciler.wait_until_current(20.0)
            assert ("give each an --id of its own" in caplog.text) is warned
            reconciler.close()
