"""docs/kubernetes.md is followed on the real cluster: each file and command of it, in order."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.api import Cluster, kubectl_program
from tests.cluster.machine import ROOT
from tests.cluster.operator_process import OperatorFactory
from tests.kubernetes.conftest import Person

PAGE = (ROOT / "docs/kubernetes.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.split("\n## Measured")[0], re.MULTILINE | re.DOTALL)


def test_installation_is_the_tested_one() -> None:
    """tests/kubernetes/chart follows the page for operators; this page installs by the same command."""
    installing = [text for language, text in BLOCKS if language == "sh"]
    assert len(installing) == 1
    assert installing[0].strip() in (ROOT / "docs/kubernetes-operators.md").read_text()


def test_page_is_true(
    cluster: Cluster,
    namespace: str,
    operator: OperatorFactory,
    tmp_path: Path,
    pod_template: Callable[..., dict[str, Any]],
) -> None:
    pytest.importorskip("torch", reason="the page's student needs torch")
    pytest.importorskip("sklearn", reason="the page's student needs scikit-learn")
    operator("--store", f"kubernetes://{namespace}")
    in_image = tmp_path / "image"
    in_image.mkdir()
    template = pod_template(memory="1Gi", reads=[in_image])
    person = Person(cluster, namespace, tmp_path, template)
    image = template["spec"]["containers"][0]["image"]
    reader = PageReader(person, namespace, {"IMAGE": image, "TEACHER": str(in_image / "teacher.py")})
    said: dict[str, str] = {}
    for language, text in BLOCKS:
        named = re.match(r"# (\w+\.py)\n", text)
        if language == "python":
            assert named is not None
            (tmp_path / named[1]).write_text(text)
            shutil.copy(tmp_path / named[1], in_image / named[1])
        elif language == "bash":
            for line in text.splitlines():
                said[line] = reader.run(line)
    follow = next(text for line, text in said.items() if "--follow" in line)
    assert re.search(r"worker-0  \| epoch 2: loss \d", follow), follow
    assert "job/first-student: Succeeded" in follow
    assert "Succeeded" in said["edl jobs"] or "no jobs" in said["edl jobs"]
    assert "first-student" in said["kubectl get elasticjobs,teacherpools"]
    assert "digits" in said["kubectl get elasticjobs,teacherpools"]
    assert "Succeeded" in said["edl status first-student"]
    assert "epoch 2" in said["edl logs first-student --tail 5"]
    assert "Events:" in said["kubectl describe elasticjob first-student"]
    assert "minReplicas" in said["kubectl explain elasticjob.spec"]
    assert not cluster.list_pods(namespace), "everything that the page made is deleted by it"


class PageReader:
    """Runs the page's lines as its reader would, with the test's image and its template for pods."""

    def __init__(self, person: Person, namespace: str, values: dict[str, str]) -> None:
        self._person = person
        self._namespace = namespace
        self._values = values

    def run(self, line: str) -> str:
        """Run a line, and return what it says."""
        for name, value in self._values.items():
            line = line.replace(f"${name}", value)
        command, _, target = line.partition(" > ")
        words = shlex.split(command)
        if words[0] == "kubectl":
            environ = {**os.environ, **self._person.environ}
            words = [self._namespace if before == "--namespace" else word for before, word in zip(["", *words], words)]  # noqa: B905
            program = [kubectl_program(), *words[1:]]
            done = subprocess.run(program, env=environ, capture_output=True, text=True, timeout=150, check=False)
            assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
            return done.stdout
        assert words[0] == "edl", f"no test runs {line!r}"
        if words[1] == "submit" and "--image" in words:
            words[2:2] = ["--template", "pod.json"]
        said = self._person.run(*words[1:])
        if target:
            start = said.index("---\n")
            (self._person.folder / target.strip()).write_text(said[start : said.index("edl submit: ", start)])
        return said
