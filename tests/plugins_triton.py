"""The real Triton server as a fixture: `triton.start()` gives one, on free ports, that a test may stop or kill.

`make tools-services` fetches it. Without it, tests that use the fixture are skipped, or fail in CI (`CI=true`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import psutil
import pytest

from edl.protocol import kserve, names
from tests.plugins_consul import free_ports
from tests.servers import ROOT, Server, lack

_PYTHON = ROOT / ".tools/triton/bin/python"
_COPIED_MODEL = "/tmp/folder??????/1/model.py"
_INSTALLED = ROOT / ".tools/triton/installed"


class TritonServer(Server):
    """A running Triton with one model."""

    def __init__(self, folder: Path, command: Sequence[str], port: int, model: str, **environ: str) -> None:
        super().__init__(folder, command, {**os.environ, "TMPDIR": str(folder), **environ})
        self.folder, self.model = folder, model
        self.port, self.endpoint = port, f"127.0.0.1:{port}"
        self._tree: list[psutil.Process] = []
        self._copies: set[Path] = set()

    def is_healthy(self) -> bool:
        with grpc.insecure_channel(self.endpoint) as channel, contextlib.suppress(grpc.RpcError):
            ask = channel.unary_unary(
                names.method("ModelReady"),
                request_serializer=kserve.ModelReadyRequest.SerializeToString,
                response_deserializer=kserve.ModelReadyResponse.FromString,
            )
            return bool(ask(kserve.ModelReadyRequest(name=self.model), timeout=2.0).ready)
        return False

    def wait(self) -> None:
        super().wait()
        self._remember_tree()

    def replace_version(self, old: str, new: str) -> None:
        """Load another version of a model of `TritonFactory.start_repository`, and unload the old one."""
        place = self.folder / "models" / self.model
        (place / old).rename(place / new)
        import tritonclient.grpc  # not on every machine that runs a part of the tests

        with tritonclient.grpc.InferenceServerClient(self.endpoint) as client:
            client.load_model(self.model)

    def stop(self, timeout_s: float = 30.0) -> None:
        """SIGTERM, wait, then SIGKILL for what is left. May be called twice."""
        self._remember_tree()
        super().stop(timeout_s)

    def kill(self) -> None:
        """SIGKILL to the server and all its helpers at once, as a lost machine would look. May be called twice."""
        self._remember_tree()
        for process in self._tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._tree, timeout=10)
        super().kill()
        for folder in (self.folder, *self._copies):
            shutil.rmtree(folder, ignore_errors=True)
        for segment in Path("/dev/shm").glob(f"pytrtion{self.pid}-*"):
            segment.unlink(missing_ok=True)

    def _remember_tree(self) -> None:
        """Note the server and its children, while their parent still knows them."""
        try:
            top = psutil.Process(self.pid)
            found = [top, *top.children(recursive=True)]
        except (psutil.NoSuchProcess, AssertionError):  # it has ended, or was not started
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
            self._copies |= {path.parents[1] for path in map(Path, arguments) if path.match(_COPIED_MODEL)}


class TritonFactory:
    """Starts Triton servers and stops what is left of them at the end of the tests."""

    def __init__(self) -> None:
        self._started: list[TritonServer] = []

    def start(self, model: str = "teacher", *, max_batch: int = 32, port: int = 0) -> TritonServer:
        """A server that is ready: x:float32[4] -> logits:float32[10], each of which is the sum of the input row.

        Args:
            port: the gRPC port, to start again where another one was; 0 for a free one.
        """
        own_port, http_port = free_ports(2)
        port = port or own_port
        folder = Path(tempfile.mkdtemp(prefix="edl-"))  # short, since Unix sockets lie below it
        command = [str(_PYTHON), str(ROOT / "tools/triton_server.py"), "--name", model, "--function", "row_sums"]
        command += ["--grpc-port", str(port), "--http-port", str(http_port), "--max-batch", str(max_batch)]
        command += ["--input", "x:float32:4", "--output", "logits:float32:10"]
        return self._begin(TritonServer(folder, command, port, model))

    def start_repository(self, model: str, version: str, source: str, config: str) -> TritonServer:
        """A Triton that loads models from a folder when it is told to (`--model-control-mode=explicit`).

        Args:
            model, version: what to begin with; `TritonServer.add_version` adds others.
            source: `model.py` of Triton's Python backend, the same for every version.
            config: `config.pbtxt`.
        """
        folder = Path(tempfile.mkdtemp(prefix="edl-"))
        packages = next((ROOT / ".tools/triton/lib").glob("python3*/site-packages"))
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
        environ = {
            "PATH": f"{_PYTHON.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(packages),
            "LD_LIBRARY_PATH": f"{packages}/nvidia_pytriton.libs:{library}",
        }
        return self._begin(TritonServer(folder, [*command, "--exit-timeout-secs=3"], port, model, **environ))

    def _begin(self, server: TritonServer) -> TritonServer:
        self._started.append(server)
        server.start()
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
