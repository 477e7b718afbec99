"""A pytest plugin with a real Prometheus: `PrometheusServer` scrapes what it is told to, and answers queries."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.plugins_consul import free_ports

ROOT = Path(__file__).parent.parent
START_S = 60.0


def prometheus_program(name: str) -> str:
    """`prometheus` or `promtool`; skips the test without it, and fails it in CI."""
    fetched = ROOT / ".tools/prometheus" / name
    found = str(fetched) if fetched.exists() else shutil.which(name)
    if found is None:
        reason = f"the program {name} is neither in .tools/prometheus nor on PATH: tools/prometheus.sh fetches it"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason}; in CI nothing may be skipped")
        pytest.skip(reason)
    return found


def check_metrics(text: bytes) -> str:
    """What `promtool check metrics` finds amiss in a page of metrics."""
    done = subprocess.run(
        [prometheus_program("promtool"), "check", "metrics"], input=text, capture_output=True, timeout=60
    )
    return (done.stdout + done.stderr).decode() + ("" if done.returncode == 0 else f"(exit code {done.returncode})")


class PrometheusServer:
    """A Prometheus on 127.0.0.1 that scrapes once a second.

    Args:
        folder: for its configuration, log and data.
        targets: `host:port` of what it scrapes at `/metrics`.
    """

    def __init__(self, folder: Path, targets: Sequence[str]) -> None:
        program = prometheus_program("prometheus")
        folder.mkdir(parents=True, exist_ok=True)
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [{"job_name": "edl", "static_configs": [{"targets": list(targets)}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ.get("PATH", "")},
            )

    def __enter__(self) -> PrometheusServer:
        deadline = time.monotonic() + START_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise RuntimeError(f"Prometheus did not start:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression gives now; an error of Prometheus's is raised in its words."""
        answer = self._ask(f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def targets(self) -> list[dict[str, Any]]:
        """What it scrapes, with `health` and `lastError`."""
        found: list[dict[str, Any]] = self._ask("/api/v1/targets")["data"]["activeTargets"]
        return found

    def _ask(self, path: str) -> Any:
        try:
            with self._opener.open(f"{self._url}{path}", timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as exc:
            return json.load(exc)

    def _ready(self) -> bool:
        with contextlib.suppress(OSError), self._opener.open(f"{self._url}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
        return False
