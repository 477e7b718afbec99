"""A person at the cluster, and the resources and the store of a story."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edl.discovery.served.addresses import ListenAddress
from edl.discovery.served.server import StoreServer
from tests.cluster.api import Cluster
from tests.cluster.machine import ROOT, KubeMachine
from tests.cluster.operator_process import OperatorFactory
from tests.kubernetes.scenarios.scene import HOST, Scene, open_consul

COMMAND_S = 300.0


class Person:
    """Runs `edl` in a folder, with a kubeconfig whose context names the test's namespace."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path, template: dict[str, Any]) -> None:
        self.folder = folder
        self.template = folder / "pod.json"
        self.template.write_text(json.dumps(template))
        config = json.loads(cluster.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
        for context in config["contexts"]:
            context["context"]["namespace"] = namespace
        kubeconfig = folder / "kubeconfig.json"
        kubeconfig.write_text(json.dumps(config))
        self.environ = {
            **os.environ,
            "KUBECONFIG": str(kubeconfig),
            "HOME": str(folder),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'serving'}",
        }
        self.started: list[subprocess.Popen[str]] = []

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run `edl ARGUMENTS`, and return what it says: output, then errors."""
        done = subprocess.run(
            [sys.executable, "-m", "edl", *arguments],
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        said = done.stdout + done.stderr
        assert done.returncode == code, f"edl {' '.join(arguments)}: exit code {done.returncode}\n{said}"
        return said

    def start(self, *arguments: str) -> tuple[subprocess.Popen[str], Path]:
        """Start `edl ARGUMENTS`; its output goes to a file."""
        path = self.folder / f"output-{len(self.started)}.txt"
        with path.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "edl", *arguments],
                cwd=self.folder,
                env={**self.environ, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                text=True,
            )
        self.started.append(process)
        return process, path

    def jobs(self) -> dict[str, Any]:
        """The jobs by name, as `edl jobs --json` has them."""
        text = next(line for line in self.run("jobs", "--json").splitlines() if line.startswith("{"))
        return {job["name"]: job for job in json.loads(text)["jobs"]}


@pytest.fixture
def person(
    cluster: Cluster, namespace: str, tmp_path: Path, pod_template: Callable[..., dict[str, Any]]
) -> Iterator[Person]:
    """Somebody with a kubeconfig."""
    found = Person(cluster, namespace, tmp_path, pod_template(cpu="1m"))
    yield found
    for process in found.started:
        process.kill()
        process.wait(10)


@pytest.fixture
def scene(
    cluster: Cluster, namespace: str, operator: OperatorFactory, pod_template: Callable[..., dict[str, Any]]
) -> Scene:
    """Resources in the test's namespace."""
    return Scene(cluster, namespace, operator, pod_template)


@pytest.fixture
def consul_store(machine: KubeMachine, tmp_path: Path) -> Iterator[str]:
    """URL of a real Consul, for this machine and for pods."""
    assert machine.running
    with open_consul(tmp_path / "consul") as url:
        yield url


@pytest.fixture
def values(tmp_path: Path, cluster: Cluster, pod_template: Callable[..., dict[str, Any]]) -> Path:
    """Values for pods that run this project: what an image would have is mounted."""
    spec = pod_template()["spec"]
    container = spec["containers"][0]
    repository, tag = container["image"].rsplit(":", 1)
    own = ("tmp", "shm")
    part = {
        "env": container["env"],
        "volumes": [volume for volume in spec["volumes"] if volume["name"] not in own],
        "volumeMounts": [mount for mount in container["volumeMounts"] if mount["name"] not in own],
    }
    path = tmp_path / "values.json"
    image = {"repository": repository, "tag": tag, "pullPolicy": container["imagePullPolicy"]}
    found = {"image": image, "command": container["command"], "operator": part, "dashboard": part, "storeServer": part}
    found["operator"] = {**part, "podSecurity": "privileged"}
    path.write_text(json.dumps(found))
    return path


@pytest.fixture
def store_address() -> str:
    """A fixed address for the service of the chart's store: the cluster has no DNS."""
    return f"10.89.0.{random.randrange(100, 250)}"


@pytest.fixture
def edl_store(machine: KubeMachine, tmp_path: Path) -> Iterator[str]:
    """URL of a store that this process serves, for this machine and for pods."""
    assert machine.running
    with contextlib.closing(StoreServer(str(tmp_path / "store.sqlite"), ListenAddress(HOST, 0))) as server:
        yield f"edl://{HOST}:{server.port}"
