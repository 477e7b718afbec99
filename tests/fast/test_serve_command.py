"""`edl serve` as a process: discovery, draining, what it says, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

from edl.discovery import Instance, open_registry
from edl.errors import EDLError, SettingsError
from edl.testing import LocalTeacher
from edl_serving import cmd_serve
from tests.plugins_consul import ConsulAgent


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/discovery.sqlite"


def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Wait until `condition` holds, and return it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)
    return found


def instances(url: str, service: str) -> tuple[Instance, ...]:
    with open_registry(url) as registry:
        return registry.snapshot(service).instances


def ask(endpoint: str, x: np.ndarray, model: str = "m", name: str = "x", output: str = "y") -> np.ndarray:
    with contextlib.closing(triton.InferenceServerClient(endpoint)) as client:
        tensor = triton.InferInput(name, x.shape, {"float32": "FP32", "uint8": "UINT8"}[x.dtype.name])
        tensor.set_data_from_numpy(x)
        answer: np.ndarray = client.infer(model, [tensor], client_timeout=30).as_numpy(output)
        return answer


@contextlib.contextmanager
def being_computed(teacher: LocalTeacher) -> Iterator[list[Any]]:
    """A request that the teacher is busy with; its answer or error, once the block has ended."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(ask(teacher.endpoint, X))
        except InferenceServerException as exc:
            found.append(exc)

    asking = threading.Thread(target=run)
    asking.start()
    page = f"http://127.0.0.1:{teacher.metrics_port}/metrics"
    until(lambda: 'edl_teacher_in_flight{model="m"} 1.0' in urllib.request.urlopen(page, timeout=10).read().decode())
    yield found
    asking.join(30)
    assert found


def edl(*arguments: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    return subprocess.run(
        [sys.executable, "-m", "edl", *arguments],
        env={**os.environ, **environ},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,  # of 120: on a busy machine an import of torch alone takes a minute
    )


X = np.arange(8, dtype=np.float32).reshape(2, 4)


def test_served_teacher_says_where_it_is(url: str) -> None:
    """A served teacher says where it is and what it is."""
    serve = {"metrics-port": 0, "tag": ["a", "b"], "meta": {"rack": "r7"}, "capacity": 2, "model-version": "v9"}
    with LocalTeacher("echo", service="s", discovery=url, serve=serve) as teacher:
        (instance,) = instances(url, "s")
        assert instance.endpoint == teacher.endpoint
        assert (instance.model, instance.capacity, instance.state, instance.tags) == ("m", 2.0, "ready", ("a", "b"))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert instance.meta == {"rack": "r7", "version": "v9", "pid": str(teacher.pid), "boot": boot}
        np.testing.assert_array_equal(ask(teacher.endpoint, X), X)
        page = urllib.request.urlopen(f"http://127.0.0.1:{teacher.metrics_port}/metrics", timeout=10).read().decode()
        assert 'edl_teacher_rows_total{model="m"} 2.0' in page
        assert re.search(r"registered as s/\S+ at sqlite:", teacher.log)


def test_sigterm_drains_and_leaves(url: str, tmp_path: Path) -> None:
    """Sigterm shows as draining finishes what is in flight and leaves."""
    serve, gate = {"linger": "300ms", "drain-timeout": "20s", "metrics-port": 0}, tmp_path / "gate"
    model = "tests.fast.serving.models:gated_echo"
    with LocalTeacher(model, service="s", discovery=url, serve=serve, gate=str(gate)) as teacher:
        with being_computed(teacher) as answers:
            teacher.terminate()
            until(lambda: [one.state for one in instances(url, "s")] == ["draining"])
            assert teacher.is_alive()
            gate.touch()
            assert teacher.wait(20) == 0
            assert instances(url, "s") == ()
        np.testing.assert_array_equal(answers, [X])


def test_a_second_sigterm_ends_at_once(url: str) -> None:
    serve = {"metrics-port": 0}
    with LocalTeacher("echo", service="s", discovery=url, delay_s=60, serve=serve) as teacher:
        with being_computed(teacher) as answers:
            teacher.terminate()
            until(lambda: "draining" in teacher.log)
            teacher.terminate()
            assert teacher.wait(20) == -signal.SIGTERM
        assert isinstance(answers[0], InferenceServerException)


def test_too_long_drain_exits_1() -> None:
    """A drain that takes too long ends with 1."""
    with LocalTeacher("echo", delay_s=60, serve={"drain-timeout": "500ms", "metrics-port": 0}) as teacher:
        with being_computed(teacher) as answers:
            teacher.terminate()
            assert teacher.wait(20) == 1
        assert isinstance(answers[0], InferenceServerException)


@pytest.mark.consul
def test_teachers_join_after_an_outage(tmp_path: Path) -> None:
    """Teachers serve while discovery is away and join when it is back."""
    agent = ConsulAgent(tmp_path / "consul")
    with LocalTeacher("echo", service="s", discovery=agent.url, wait=False) as teacher:
        until(lambda: "discovery does not answer" in teacher.log)
        port = re.search(r"served on 127.0.0.1:(\d+)", teacher.log)
        assert port is not None
        np.testing.assert_array_equal(ask(f"127.0.0.1:{port[1]}", X), X)
        agent.start()
        try:
            teacher.wait_ready(30)
            (instance,) = until(lambda: instances(agent.url, "s"))
            assert instance.port == int(port[1])
            agent.kill()
            np.testing.assert_array_equal(ask(teacher.endpoint, X), X)
        finally:
            agent.kill()
        teacher.terminate()
        assert teacher.wait(40) == 0
        assert "Traceback" not in teacher.log


def test_outside_discovery_on_a_unix_socket(tmp_path: Path) -> None:
    """A teacher may stay out of discovery and listen on a unix socket too."""
    with LocalTeacher("echo", serve={"uds": tmp_path / "teacher.sock"}) as teacher:
        np.testing.assert_array_equal(ask(f"unix:{tmp_path}/teacher.sock", X), X)
        assert "registered" not in teacher.log


MODEL = """
    import numpy as np

    def double(inputs):
        return {"y": inputs["x"] * 2}

    def breaks(inputs):
        return int("not a number")

    class Broken:
        def __init__(self):
            raise RuntimeError("the weights are gone")

    class Cold:
        inputs, outputs = ["x:float32[4]"], ["y:float32[4]"]

        def __call__(self, inputs):
            return inputs

        def warm_up(self, max_rows):
            raise RuntimeError("too cold")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "teacher.py").write_text(textwrap.dedent(MODEL))
    (tmp_path / "module.py").write_text("import torch\n\nnet = torch.nn.Linear(4, 2)\n")
    return tmp_path


def test_flags_win_over_a_config_file(folder: Path, url: str) -> None:
    """A config file serves and flags win over it."""
    (folder / "teacher.toml").write_text(
        f'callable = "{folder}/teacher.py:double"\ninput = ["x:float32[4]"]\nmax-batch = 1\n'
    )
    serve = {"config": folder / "teacher.toml", "max-batch": 3}
    with LocalTeacher("", serve=serve, service="s", discovery=url) as teacher:
        np.testing.assert_array_equal(ask(teacher.endpoint, X), 2 * X)
        with contextlib.closing(triton.InferenceServerClient(teacher.endpoint)) as client:
            assert client.get_model_config("m").config.max_batch_size == 3
            version = client.get_model_metadata("m").versions[0]
    (folder / "teacher.py").write_text(textwrap.dedent(MODEL).replace("* 2", "* 3"))
    with (
        LocalTeacher("", serve=serve) as teacher,
        contextlib.closing(triton.InferenceServerClient(teacher.endpoint)) as client,
    ):
        np.testing.assert_array_equal(ask(teacher.endpoint, X), 3 * X)
        assert client.get_model_metadata("m").versions[0] != version


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--callable", "nowhere.py:f", "--input", "x:float32"], "there is no file 'nowhere.py'"),
        (["--callable", "teacher.py:dubble", "--input", "x:float32"], "has no 'dubble'; did you mean 'double'"),
        (["--callable", "teacher.py:double"], "nobody says what the model's inputs are"),
        (["--callable", "teacher.py:double", "--input", "x:float33"], "unknown datatype 'float33'"),
        (["--callable", "teacher.py:double", "--input", "x:float32", "--option", "a=1"], "--option means nothing"),
        (["--factory", "teacher.py:Broken", "--option", "widht=4"], "unexpected keyword argument 'widht'"),
        (["--factory", "edl.testing.models:echo", "--config", "none.toml"], "--config 'none.toml': No such file"),
        (["--factory", "edl.testing.models:echo", "--port", "{taken}"], "cannot listen on 127.0.0.1:{taken}"),
        (["--factory", "edl.testing.models:echo", "--port", "{taken}"], "another --port does, or 0 for a free one"),
        (["--factory", "edl.testing.models:echo", "--host", "300.1.1.1"], "listen on 300.1.1.1:0: no address of that"),
        (["--factory", "edl.testing.models:echo", "--host", "192.0.2.1"], "no such address; give --host 127.0.0.1 for"),
        (["--factory", "edl.testing.models:echo", "--uds", "no/such/socket"], "there is no folder '{folder}/no/such'"),
        (
            ["--factory", "edl.testing.models:echo", "--uds", "/proc/socket"],
            "--uds '/proc/socket': no socket can be made there: No",
        ),
        (
            ["--factory", "edl.testing.models:echo", "--uds", "x" * 108],
            "no socket can be made there: AF_UNIX path too long",
        ),
        (["--factory", "edl.testing.models:echo", "--uds", "teacher.py"], "is there already, and is no socket"),
        (["--callable", "module.py:net", "--input", "x:float32[4]"], "give --torch-factory a function that returns it"),
        (["--factory", "edl.testing.models:echo", "--metrics-port", "{taken}"], "{taken}"),
        (
            ["--factory", "edl.testing.models:echo", "--ready-file", "no/such/folder"],
            "--ready-file: there is no folder",
        ),
        (["--factory", "edl.testing.models:echo", "--exit-with", "{gone}"], "there is no such process"),
        (["--factory", "edl.testing.models:echo", "--discovery", "sqlite:///proc/x"], "/proc/x"),
        (["--torchscript", "teacher.py"], "--torchscript"),
        (["--paddle", "nothing"], "there is neither"),
    ],
)
def test_what_the_user_got_wrong_is_named(
    arguments: list[str], words: str, folder: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the current folder is added to it
    monkeypatch.setattr(cmd_serve, "log_to_stderr", lambda *args, **kwargs: None)
    monkeypatch.setenv("EDL_DISCOVERY", url)
    gone = subprocess.Popen(["true"])
    gone.wait()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        known = {"taken": listener.getsockname()[1], "gone": gone.pid, "folder": folder}
        with pytest.raises(SettingsError, match=re.escape(words.format(**known))):
            cmd_serve.main(["--model", "m", *(argument.format(**known) for argument in arguments)])
    assert (folder / "teacher.py").is_file()


@pytest.mark.parametrize("where", [["--host", "300.1.1.1"], ["--uds", "/no/such/socket"]])
def test_grpc_words_are_not_heard(where: list[str], url: str) -> None:
    """Grpcs own words about an address are not heard."""
    done = edl("serve", "--model", "m", "--factory", "edl.testing.models:echo", *where, EDL_DISCOVERY=url)
    assert done.returncode == 2, done.stderr
    assert "GRPC" not in done.stderr
    assert "add_port" not in done.stderr


def test_dead_teachers_socket_is_replaced(tmp_path: Path) -> None:
    """A socket that a dead teacher left is replaced."""
    path = tmp_path / "teacher.sock"
    with LocalTeacher("echo", serve={"uds": path}) as teacher:
        teacher.kill()
        teacher.wait(20)
    assert path.is_socket()
    with LocalTeacher("echo", serve={"uds": path}):
        np.testing.assert_array_equal(ask(f"unix:{path}", X), X)


def test_live_teachers_socket_is_kept(tmp_path: Path, url: str) -> None:
    """The socket of a live teacher is left to it."""
    path = tmp_path / "teacher.sock"
    with LocalTeacher("echo", serve={"uds": path}):
        model = ["--model", "m", "--factory", "edl.testing.models:echo"]
        done = edl("serve", *model, "--uds", str(path), EDL_DISCOVERY=url)
        assert done.returncode == 2, done.stderr
        assert "in use by another server" in done.stderr
        np.testing.assert_array_equal(ask(f"unix:{path}", X), X)


def test_users_errors_are_one_line(folder: Path, url: str) -> None:
    """The users errors are one line and code 2."""
    done = edl("serve", "--model", "m", "--callable", "teacher.py:dubble", cwd=folder, EDL_DISCOVERY=url)
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(r"edl serve: --callable 'teacher.py:dubble': .* did you mean 'double'\?\n", done.stderr)


def test_a_missing_framework_is_named(folder: Path, url: str) -> None:
    without = (
        "import sys; sys.modules['torch'] = sys.modules['paddle'] = None; from edl.cli import main; sys.exit(main())"
    )
    for source, package in (("torchscript", "torch"), ("paddle", "paddlepaddle")):
        done = subprocess.run(
            [sys.executable, "-c", without, "serve", "--model", "m", f"--{source}", "teacher.py", "--discovery", url],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=folder,
        )
        assert done.returncode == 2, done.stderr
        assert f"is not installed: pip install {package}" in done.stderr


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (["--factory", "teacher.py:Broken"], "RuntimeError: the weights are gone"),
        (["--callable", "teacher.py:breaks", "--input", "x:float32[4]"], "ValueError: invalid literal"),
        (["--factory", "teacher.py:Cold"], "RuntimeError: too cold"),
    ],
)
def test_breaking_model_shows_its_stack(source: list[str], words: str, folder: Path, url: str) -> None:
    """A model that breaks shows its own stack and code 3."""
    done = edl("serve", "--model", "m", *source, cwd=folder, EDL_DISCOVERY=url)
    assert done.returncode == 3, done.stderr
    assert words in done.stderr
    stack = done.stderr[done.stderr.index("Traceback") :]
    assert "teacher.py" in stack
    assert "edl_serving" not in stack


@pytest.mark.parametrize("output", [[], ["--output", "y:float32[2]"]])  # found by calling it, or called to warm up
def test_unfit_input_has_the_models_words(output: list[str], folder: Path, url: str) -> None:
    """An input that does not fit the model is named with the models complaint."""
    pytest.importorskip("torch")
    (folder / "built.py").write_text("import torch\n\ndef net():\n    return torch.nn.Linear(4, 2)\n")
    model = ["--torch-factory", "built.py:net", "--input", "x:float32[5]", "--device", "cpu", *output]
    done = edl("serve", "--model", "m", *model, cwd=folder, EDL_DISCOVERY=url)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    words = "edl serve: the model was called with zeros of the types and sizes of --input 'x:float32[5]', and failed: "
    assert done.stderr.splitlines()[-1].startswith(words + "RuntimeError: mat1 and mat2 shapes cannot be multiplied")


def test_users_stack_ends_with_its_input(folder: Path, url: str) -> None:
    """The stack of a users function ends with what it was given."""
    np.savez(folder / "sample.npz", x=np.zeros((2, 5), np.float32))
    for given, words in (
        (["--input", "x:float32[4]"], "zeros of the types and sizes of --input 'x:float32[4]'"),
        (["--sample", "sample.npz"], "the batch in --sample 'sample.npz'"),
    ):
        done = edl("serve", "--model", "m", "--callable", "teacher.py:breaks", *given, cwd=folder, EDL_DISCOVERY=url)
        assert done.returncode == 3, done.stderr
        assert "in breaks" in done.stderr
        assert done.stderr.splitlines()[-1] == f"edl serve: it was called with {words}"


def test_help_loads_no_framework() -> None:
    """Help teaches without loading a framework."""
    done = edl("serve", "--help")
    assert done.returncode == 0
    for words in ("examples:", "--max-delay TIME", "exit codes: 0 drained", "edl serve --config teacher.toml"):
        assert words in done.stdout
    loaded = "import sys, edl_serving.cmd_serve, edl_serving.cmd_register; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, timeout=60).stdout.split()
    assert not {"torch", "paddle", "sklearn"} & set(modules)


# LocalTeacher.

MARK = {"tag": f"edl-mark-{os.getpid()}-"}  # of this process: 12 is not to find those of 123


@pytest.fixture
def processes() -> Iterator[Callable[[], list[int]]]:
    """Process ids of teachers that run."""

    def running() -> list[int]:
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdecimal() and MARK["tag"].encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
        return found

    yield running
    for pid in running():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_pause_resume_and_kill() -> None:
    """A teacher can be paused resumed and killed."""
    with LocalTeacher("echo") as teacher:
        teacher.pause()
        with contextlib.closing(triton.InferenceServerClient(teacher.endpoint)) as client:
            with pytest.raises(InferenceServerException, match="Deadline"):
                client.is_server_ready(client_timeout=0.3)
            teacher.resume()
            until(lambda: client.is_server_ready(client_timeout=5))
        teacher.kill()
        assert teacher.returncode == -signal.SIGKILL
        assert not teacher.is_alive()
    teacher.close()
    assert "is served on" in teacher.log


def test_letting_go_of_a_teacher_ends_it(processes: Callable[[], list[int]]) -> None:
    teacher = LocalTeacher("echo", serve=MARK)
    teacher.pause()
    assert processes() == [teacher.pid]
    del teacher
    assert processes() == []


PARENT = """
import sys, time
from edl.testing import LocalTeacher
from edl_serving import cmd_serve
mark = {"tag": sys.argv[1]}
teachers = [LocalTeacher("echo", serve=mark, wait=False) for _ in range(2)]
for teacher in teachers:
    teacher.wait_ready()
teachers[0].pause()
print("up", flush=True)
time.sleep(60)
"""


def test_killed_parent_takes_teachers_along(processes: Callable[[], list[int]]) -> None:
    """A parent that is killed takes its teachers along paused or not."""
    # `-c` carries the mark in its own arguments too, so it counts as one of three.
    with subprocess.Popen([sys.executable, "-c", PARENT, MARK["tag"]], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        assert len(processes()) == 3
        parent.kill()
        left = list(Path(tempfile.gettempdir()).glob(f"edl-teacher-{parent.pid}-*"))
    until(lambda: processes() == [], 20)
    assert left == []


def test_teacher_that_cannot_start_says_why(processes: Callable[[], list[int]]) -> None:
    """A teacher that cannot start says why."""
    with pytest.raises(EDLError, match=r"ended with code 2 before it was ready:(.|\n)*no 'nonesuch'"):
        LocalTeacher("nonesuch", serve=MARK)
    with pytest.raises(EDLError, match="not ready within"):
        LocalTeacher("echo", serve=MARK, timeout_s=0.05)
    assert processes() == []


def test_models_for_tests_misbehave_as_told(tmp_path: Path) -> None:
    with (
        LocalTeacher("nan", wait=False) as nan,
        LocalTeacher("raises", while_exists=str(tmp_path / "broken"), wait=False) as raises,
        LocalTeacher("wrong_shape", every=2, wait=False) as wrong_shape,
    ):
        with pytest.raises(InferenceServerException, match=r"output 'y' has NaN in row 0 of 2"):
            ask(nan.endpoint, X)
        np.testing.assert_array_equal(ask(raises.endpoint, X), X)
        (tmp_path / "broken").touch()
        with pytest.raises(InferenceServerException, match="raised RuntimeError: boom"):
            ask(raises.endpoint, X)
        np.testing.assert_array_equal(ask(wrong_shape.endpoint, X), X)
        with pytest.raises(InferenceServerException, match=r"shape \[2, 5\], not \[2, 4\]"):
            ask(wrong_shape.endpoint, X)
        np.testing.assert_array_equal(ask(wrong_shape.endpoint, X), X)


def test_ready_files_are_whole(tmp_path: Path) -> None:
    """Ready files are whole and gone when the teacher leaves."""
    ready = tmp_path / "ready.json"
    ready.write_text("of a teacher before")
    command = [sys.executable, "-m", "edl_serving", "serve", "--factory", "edl.testing.models:echo", "--model", "m"]
    command += ["--discovery", "none", "--ready-file", str(ready), "--metrics-port", "0"]

    def said() -> str:
        with contextlib.suppress(FileNotFoundError):  # what a teacher before said is removed first
            if (text := ready.read_text()) != "of a teacher before":
                return text
        return ""

    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            found = json.loads(until(said))
            assert found["pid"] == process.pid
            assert found["endpoint"] == f"127.0.0.1:{found['port']}"
            assert found["metrics_port"] > 0
            process.terminate()
            assert process.wait(20) == 0
        finally:
            process.kill()
    assert not list(tmp_path.glob("*ready*"))
