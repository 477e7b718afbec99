"""A pytest plugin with a real Prometheus: `PrometheusServer` scrapes what it is told to, and answers queries."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.plugins_consul import free_ports
from tests.servers import Server, find_program


def check_metrics(text: bytes) -> str:
    """What `promtool check metrics` finds amiss in a page of metrics."""
    done = subprocess.run(
        [find_program("promtool", "prometheus"), "check", "metrics"], input=text, capture_output=True, timeout=60
    )
    return (done.stdout + done.stderr).decode() + ("" if done.returncode == 0 else f"(exit code {done.returncode})")


class PrometheusServer(Server):
    """A Prometheus on 127.0.0.1 that scrapes once a second.

    Args:
        folder: for its configuration, log and data.
        targets: `host:port` of what it scrapes at `/metrics`.
    """

    def __init__(self, folder: Path, targets: Sequence[str]) -> None:
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [{"job_name": "edl", "static_configs": [{"targets": list(targets)}]}],
        }
        command = [find_program("prometheus", "prometheus"), f"--config.file={folder / 'prometheus.yml'}"]
        command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
        super().__init__(folder, command)
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML

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

    def is_healthy(self) -> bool:
        with contextlib.suppress(OSError), self._opener.open(f"{self._url}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
        return False
