"""The cluster on this machine: what `../shared/kube/kube` builds and runs."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT.parent / "shared/kube/kube"
BRIDGE = "edl0"  # of the script
UP_S = 900.0  # building included, where tools/kubernetes.sh has not
ASK_S = 60.0
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edl/kube"
HOMES = (CACHE, Path("/opt/edl-kube"))  # ours, and the script's own default
GIVEN_HOME = os.environ.get("EDL_KUBE_HOME", "")


class KubeMachine:
    """Two nodes on this machine; needs root."""

    def __init__(self) -> None:
        homes = (Path(GIVEN_HOME),) if GIVEN_HOME else HOMES
        built = [home for home in homes if (home / "bin/kubelet").exists()]
        running = [home for home in homes if self._runs(home)]
        self.home = (running or built or list(homes))[0]
        self._marker = self.home / "run/started-by-tests"

    @staticmethod
    def _runs(home: Path, program: str = "apiserver", command: bytes = b"kube-apiserver") -> bool:
        try:
            pid = int((home / f"run/{program}.pid").read_text())
            return command in Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return False

    @property
    def running(self) -> bool:
        return self._runs(self.home)

    @property
    def started_by_tests(self) -> bool:
        return self._marker.exists()

    def up(self) -> None:
        """Bring it up, if it is not; what a test run brought up is taken down by `down`."""
        if not self.running:
            self._script("build", timeout_s=UP_S)
            subprocess.run(["bash", str(ROOT / "tools/kubelet.sh"), str(self.home)], check=True, timeout=ASK_S)
            self._delete_bridge()
            self._script("up", "2", timeout_s=UP_S)
            self._marker.touch()
        self._publish_ca()

    @staticmethod
    def _delete_bridge() -> None:
        """Delete what an earlier cluster left of its network, so that the script makes it anew.

        It finds the address of a bridge that is there by `ip addr | grep -q` under pipefail, which fails where `ip`
        writes on after `grep` has seen enough; then it cannot give the address a second time.
        """
        if Path("/sys/class/net", BRIDGE).exists():
            subprocess.run(["ip", "link", "delete", BRIDGE], check=True, timeout=ASK_S)

    def down(self) -> None:
        """Stop everything."""
        self._script("down", timeout_s=120.0)

    def write_kubeconfig(self, path: Path) -> None:
        """Write the administrator's kubeconfig, which checks the API server's certificate."""
        authority = base64.b64encode((self.home / "run/certs/apiserver.crt").read_bytes()).decode()
        path.touch(0o600)
        server = {"server": "https://10.88.0.1:6444", "certificate-authority-data": authority}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "edl", "cluster": server}],
            "users": [{"name": "admin", "user": {"token": "edl-test-admin"}}],
            "contexts": [{"name": "edl", "context": {"cluster": "edl", "user": "admin"}}],
            "current-context": "edl",
        }
        path.write_text(json.dumps(config))

    def load_image(self, folder: Path) -> str:
        """Make an image out of a folder, load it on every node, and return its name, which tells its files' names."""
        entrypoint = ["/usr/bin/true"]
        listing = "\n".join(
            f"{path.relative_to(folder)} {path.lstat().st_mode:o} {path.readlink() if path.is_symlink() else ''}"
            for path in sorted(folder.rglob("*"))
        )
        digest = hashlib.sha256(f"{entrypoint}\n{listing}".encode()).hexdigest()[:8]
        name = f"docker.io/edl/test:{digest}"
        if not (self.home / f"images/docker.io_edl_test_{digest}.tar").exists():
            self._script("image", name, str(folder), json.dumps(entrypoint), timeout_s=ASK_S)
        return name

    def set_gpus(self, node: str, count: int) -> None:
        """Advertise so many `nvidia.com/gpu` on a node: for scheduling, there is no device behind them."""
        self._script("gpus", node, str(count), timeout_s=ASK_S)

    def stop_node(self, node: str) -> None:
        """Kill a node's kubelet and containers: the machine goes away."""
        self._script("stop-node", node, timeout_s=ASK_S)

    def start_node(self, node: str) -> None:
        """Bring a node back, and wait until it is ready."""
        self._script("start-node", node, timeout_s=120.0)

    def list_stopped_nodes(self) -> list[str]:
        """Nodes whose kubelet does not run."""
        names = (self.home / "run/nodes").read_text().split()
        return [name for name in names if not self._runs(self.home, f"{name}.kubelet", b"kubelet")]

    def stop_api_server(self) -> None:
        """Stop the API server's process where it is: no connection is answered, and none is refused."""
        os.kill(self._pid("apiserver"), signal.SIGSTOP)

    def continue_api_server(self) -> None:
        """Let the API server go on."""
        os.kill(self._pid("apiserver"), signal.SIGCONT)

    def _pid(self, program: str) -> int:
        return int((self.home / f"run/{program}.pid").read_text())

    def _script(self, *arguments: str, timeout_s: float) -> None:
        # Into a file: what the script leaves running would hold a pipe open.
        log = self.home / "kube.log"
        self.home.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            begin = output.tell()
            done = subprocess.run(
                ["bash", str(SCRIPT), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=timeout_s,
                check=False,
                env={**os.environ, "EDL_KUBE_HOME": str(self.home)},
            )
        if done.returncode:
            with log.open("rb") as text:
                text.seek(begin)
                raise RuntimeError(f"kube {' '.join(arguments)} failed:\n{text.read().decode()[-3000:]}")

    def _publish_ca(self) -> None:
        """Have service accounts carry the API server's CA, as in every cluster: programs in pods check it."""
        pid = self._pid("controller-manager")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
        if any(argument.startswith("--root-ca-file") for argument in command):
            return
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + ASK_S
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        run = self.home / "run"
        with (run / "controller-manager.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, f"--root-ca-file={run}/certs/apiserver.crt"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=run,
                start_new_session=True,
            )
        (run / "controller-manager.pid").write_text(f"{process.pid}\n")
        process.returncode = 0  # it lives on: `kube down` ends it, and Popen need not say that nobody waited for it
