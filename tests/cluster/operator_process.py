"""`edl operator` as a process of this machine, with no more rights than the chart gives its service account."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.cluster.api import Cluster, helm_program, run_program
from tests.cluster.machine import ROOT

CHART = ROOT / "serving/kube/chart"
RELEASE = "edl"
ACCOUNT = "edl-operator"
STOP_S = 60.0
PRINTED_S = 60.0


def render_chart(namespace: str, *options: str, helm: str = "") -> str:
    """What `helm template` makes of the chart."""
    command = [helm or helm_program(), "template", RELEASE, str(CHART), "--namespace", namespace, *options]
    return run_program(command, timeout_s=60.0)


def install_account(cluster: Cluster, namespace: str, *, capacity: bool) -> None:
    """Make the operator's service account and what it may do; `capacity` lets it see nodes and all pods."""
    options = ["--set", "crds.install=false,priorityClasses.install=false,operator.enabled=false,store=edl://unused"]
    options += ["--show-only", "templates/rbac.yaml"]
    if capacity:
        options += ["--set", f"capacity.enabled=true,capacity.name=edl-capacity-{namespace}"]
        options += ["--show-only", "templates/capacity.yaml"]
    cluster.kubectl("-n", namespace, "apply", "-f", "-", text=render_chart(namespace, *options))
    # The API server hears of roles and bindings by watches of its own.
    user = f"system:serviceaccount:{namespace}:{ACCOUNT}"
    cluster.wait("the rights", lambda: cluster.may(user, "list", "pods", namespace), namespace)
    if capacity:
        cluster.wait("the rights", lambda: cluster.may(user, "list", "nodes"), namespace)


class OperatorProcess:
    """A running `edl operator`."""

    def __init__(self, arguments: list[str], kubeconfig: Path, log: Path) -> None:
        self.arguments = arguments
        self.kubeconfig = kubeconfig
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; it may run already elsewhere."""
        assert not self.running
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "edl", "operator", *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env={**os.environ, "KUBECONFIG": str(self.kubeconfig), "PYTHONUNBUFFERED": "1"},
            )

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def text(self) -> str:
        """All that it has printed."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def ask(self, path: str) -> tuple[int, str]:
        """Status and text of a page on the port of its metrics, which it has printed."""
        self.wait_for("metrics on port ")
        port = int(self.text.partition("metrics on port ")[2].split()[0])
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as exc:
            return exc.code, exc.read().decode()

    def wait_for(self, text: str) -> None:
        """Wait until it has printed a text."""
        deadline = time.monotonic() + PRINTED_S
        while text not in self.text:
            assert self.running, f"the operator has ended:\n{self.text[-3000:]}"
            assert time.monotonic() < deadline, f"the operator has not printed {text!r}:\n{self.text[-3000:]}"
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGKILL)
            self.process.wait(STOP_S)

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        assert self.process is not None
        if self.running:
            self.process.terminate()
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the operator did not end after SIGTERM:\n{self.text[-3000:]}") from None


class OperatorFactory:
    """Starts operators: `operator("--store", url)`, with `capacity=True` for the watch of nodes and all pods."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._folder = folder
        self._capacity: bool | None = None
        self._started: list[OperatorProcess] = []

    def __call__(self, *arguments: str, capacity: bool = False) -> OperatorProcess:
        """Start an operator of the namespace; arguments are those of `edl operator`."""
        kubeconfig = self._folder / "operator-kubeconfig.json"
        if self._capacity is None or (capacity and not self._capacity):
            install_account(self._cluster, self._namespace, capacity=capacity)
            self._cluster.write_account_kubeconfig(self._namespace, ACCOUNT, kubeconfig)
            self._capacity = capacity
        log = self._folder / f"operator-{len(self._started)}.log"
        # Members mount this machine's Python and project.
        arguments = ("--namespace", self._namespace, "--pod-security", "privileged", *arguments)
        process = OperatorProcess(list(arguments), kubeconfig, log)
        self._started.append(process)
        process.start()
        return process

    @property
    def text(self) -> str:
        """What all of them printed last."""
        return "\n".join(f"--- {process.log.name}\n{process.text[-8000:]}" for process in self._started)

    def close(self) -> None:
        """End them, and take back their rights outside the namespace."""
        for process in self._started:
            process.kill()
        if self._capacity:
            for kind in ("clusterrolebinding", "clusterrole"):
                self._cluster.kubectl("delete", "--ignore-not-found", kind, f"edl-capacity-{self._namespace}")
