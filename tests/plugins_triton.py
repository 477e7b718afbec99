"""The real Triton server as a fixture: `triton.start()` gives one, on free ports, that a test may stop or kill.

`make tools-services` fetches it. Without it, tests that use the fixture are skipped, or fail in CI (`CI=true`).
"""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
import psutil
import pytest

from edl.protocol import kserve, names
from tests.plugins_consul import free_ports
from tests.servers import lack

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PYTHON = _ROOT / ".tools/triton/bin/python"
_COPIED_MODEL = "/tmp/folder??????/1/model.py"
_INSTALLED = _ROOT / ".tools/triton/installed"


@dataclass
class TritonServer:
    """A running Triton.

    Attributes:
        endpoint: gRPC target, `127.0.0.1:port`.
        model: name of the only model.
    """

    endpoint: str
    model: str
    process: subprocess.Popen[bytes]
    folder: pathlib.Path
    _tree: list[psutil.Process] = field(default_factory=list)
    _copies: set[pathlib.Path] = field(default_factory=set)

    @property
    def port(self) -> int:
        """The gRPC port."""
        return int(self.endpoint.rpartition(":")[2])

    @property
    def log(self) -> str:
        """What the server printed so far."""
        return (self.folder / "log").read_text(errors="replace")

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the model answers `ModelReady`.

        Raises:
            AssertionError: the process ended, or `timeout_s` passed; with the end of the log.
        """
        deadline = time.monotonic() + timeout_s
        request = kserve.ModelReadyRequest(name=self.model)
        while True:
            if (code := self.process.poll()) is not None:
                raise AssertionError(f"Triton ended with code {code}:\n{self.log[-3000:]}")
            with grpc.insecure_channel(self.endpoint) as channel:
                ask = channel.unary_unary(
                    names.method("ModelReady"),
                    request_serializer=kserve.ModelReadyRequest.SerializeToString,
                    response_deserializer=kserve.ModelReadyResponse.FromString,
                )
                try:
                    if ask(request, timeout=2.0).ready:
                        break
                except grpc.RpcError:
                    pass  # not up yet: asked again until the deadline
            if time.monotonic() > deadline:
                raise AssertionError(f"Triton was not ready within {timeout_s} s:\n{self.log[-3000:]}")
            time.sleep(0.1)
        self._remember_tree()

    def add_version(self, version: str, *, instead_of: str = "") -> None:
        """Load another version of a model of `TritonFactory.start_repository`, and unload one."""
        place = self.folder / "models" / self.model
        known = next(path for path in place.iterdir() if path.is_dir())
        shutil.copytree(known, place / version)
        if instead_of:
            shutil.rmtree(place / instead_of)
        import tritonclient.grpc  # not on every machine that runs a part of the tests

        with tritonclient.grpc.InferenceServerClient(self.endpoint) as client:
            client.load_model(self.model)

    def stop(self, timeout_s: float = 30.0) -> None:
        """SIGTERM, wait, then SIGKILL for what is left. May be called twice."""
        self._remember_tree()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                pass  # killed below
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the server and all its helpers at once, as a lost machine would look. May be called twice."""
        self._remember_tree()
        for process in self._tree:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(self._tree, timeout=10)
        self.process.wait(10)
        for folder in (self.folder, *self._copies):
            shutil.rmtree(folder, ignore_errors=True)
        for segment in pathlib.Path("/dev/shm").glob(f"pytrtion{self.process.pid}-*"):
            segment.unlink(missing_ok=True)

    def _remember_tree(self) -> None:
        """Note the server and its children, while their parent still knows them."""
        try:
            top = psutil.Process(self.process.pid)
            found = [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        # multiprocessing's resource tracker is left alone: it frees shared memory and goes by itself.
        known = set(self._tree)
        for process in found:
            try:
                arguments = process.cmdline()
            except psutil.Error:
                continue
            if process not in known and not any("resource_tracker" in argument for argument in arguments):
                self._tree.append(process)
            # Triton copies each model to a folder that it deletes only when it ends in peace.
            self._copies |= {path.parents[1] for path in map(pathlib.Path, arguments) if path.match(_COPIED_MODEL)}


class TritonFactory:
    """Starts Triton servers and stops what is left of them at the end of the tests."""

    def __init__(self) -> None:
        self._started: list[TritonServer] = []

    def start(
        self,
        model: str = "teacher",
        *,
        max_batch: int = 32,
        port: int = 0,
        timeout_s: float = 60.0,
    ) -> TritonServer:
        """A server that is ready: x:float32[4] -> logits:float32[10], each of which is the sum of the input row.

        Args:
            port: the gRPC port, to start again where another one was; 0 for a free one.
        """
        own_port, http_port = free_ports(2)
        port = port or own_port
        folder = pathlib.Path(tempfile.mkdtemp(prefix="edl-"))  # short, since Unix sockets lie below it
        command = [str(_PYTHON), str(_ROOT / "tools/triton_server.py"), "--name", model, "--function", "row_sums"]
        command += ["--grpc-port", str(port), "--http-port", str(http_port), "--max-batch", str(max_batch)]
        command += ["--input", "x:float32:4", "--output", "logits:float32:10"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(folder)},
            )
        server = TritonServer(f"127.0.0.1:{port}", model, process, folder)
        self._started.append(server)
        server.wait_ready(timeout_s)
        return server

    def start_repository(self, model: str, version: str, source: str, config: str) -> TritonServer:
        """A Triton that loads models from a folder when it is told to (`--model-control-mode=explicit`).

        Args:
            model, version: what to begin with; `TritonServer.add_version` adds others.
            source: `model.py` of Triton's Python backend, the same for every version.
            config: `config.pbtxt`.
        """
        folder = pathlib.Path(tempfile.mkdtemp(prefix="edl-"))
        packages = next((_ROOT / ".tools/triton/lib").glob("python3*/site-packages"))
        installed = packages / "pytriton/tritonserver"
        backend = folder / "backends/python"
        shutil.copytree(installed / "backends/python", backend)
        # PyTriton keeps the program that runs a model apart, for the Python that it is for.
        shutil.copy(next(installed.glob(f"python_backend_stubs/{packages.parent.name[6:]}/*")), backend)
        place = folder / "models" / model / version
        place.mkdir(parents=True)
        (place / "model.py").write_text(source)
        (place.parent / "config.pbtxt").write_text(config)
        port = free_ports(1)[0]
        script = "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"
        library = subprocess.run([_PYTHON, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
        command = [str(installed / "bin/tritonserver"), f"--model-repository={folder}/models"]
        command += [f"--backend-directory={folder}/backends", "--model-control-mode=explicit", f"--load-model={model}"]
        command += ["--grpc-address=127.0.0.1", f"--grpc-port={port}", "--allow-http=false", "--allow-metrics=false"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "--exit-timeout-secs=3"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "TMPDIR": str(folder),
                    "PATH": f"{_PYTHON.parent}:{os.environ['PATH']}",
                    "PYTHONPATH": str(packages),
                    "LD_LIBRARY_PATH": f"{packages}/nvidia_pytriton.libs:{library}",
                },
            )
        server = TritonServer(f"127.0.0.1:{port}", model, process, folder)
        self._started.append(server)
        server.wait_ready()
        return server

    def close(self) -> None:
        """Kill everything that was started."""
        for server in self._started:
            server.kill()


@pytest.fixture(scope="session")
def triton() -> Iterator[TritonFactory]:
    """Starts real Triton servers; see `TritonFactory.start`."""
    if not _INSTALLED.exists():
        lack("the real Triton server is not installed; `make tools` (tools/triton.sh) fetches it")
    factory = TritonFactory()
    yield factory
    factory.close()
