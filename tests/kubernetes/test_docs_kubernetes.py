"""docs/kubernetes.md is followed on the real cluster: each file and command of it, in order."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.cluster.api import in_namespace, kubectl_program, run_program
from tests.cluster.machine import ROOT
from tests.kubernetes.conftest import Person
from tests.kubernetes.scenarios.scene import Scene

PAGE = (ROOT / "docs/kubernetes.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.split("\n## Measured")[0], re.MULTILINE | re.DOTALL)


def test_installation_is_the_tested_one() -> None:
    """tests/kubernetes/chart follows the page for operators; this page installs by the same command."""
    installing = [text for language, text in BLOCKS if language == "sh"]
    assert len(installing) == 1
    assert installing[0].strip() in (ROOT / "docs/kubernetes-operators.md").read_text()


def test_page_is_true(scene: Scene, tmp_path: Path, edl_store: str) -> None:
    pytest.importorskip("torch", reason="the page's student needs torch")
    pytest.importorskip("sklearn", reason="the page's student needs scikit-learn")
    cluster, namespace = scene.cluster, scene.namespace
    scene.operator("--store", edl_store)
    in_image = tmp_path / "image"
    in_image.mkdir()
    template = scene.pod_template(memory="1Gi", reads=[in_image])
    person = Person(cluster, namespace, tmp_path, template)
    image = template["spec"]["containers"][0]["image"]
    values = {"IMAGE": image, "TEACHER": str(in_image / "teacher.py")}
    said: dict[str, str] = {}
    for language, text in BLOCKS:
        named = re.match(r"# (\w+\.py)\n", text)
        if language == "python":
            assert named is not None
            (tmp_path / named[1]).write_text(text)
            shutil.copy(tmp_path / named[1], in_image / named[1])
        elif language == "bash":
            for line in text.splitlines():
                said[line] = run_line(person, namespace, values, line)
    follow = next(text for line, text in said.items() if "--follow" in line)
    assert re.search(r"worker-0  \| epoch 2: loss \d", follow), follow
    assert "job/first-student: Succeeded" in follow
    assert "Succeeded" in said["edl jobs"] or "No jobs" in said["edl jobs"]
    assert "first-student" in said["kubectl get elasticjobs,teacherpools"]
    assert "digits" in said["kubectl get elasticjobs,teacherpools"]
    assert "Succeeded" in said["edl status first-student"]
    assert "epoch 2" in said["edl logs first-student --tail 5"]
    assert "Events:" in said["kubectl describe elasticjob first-student"]
    assert "minReplicas" in said["kubectl explain elasticjob.spec"]
    assert not cluster.list_pods(namespace), "everything that the page made is deleted by it"


def run_line(person: Person, namespace: str, values: dict[str, str], line: str) -> str:
    """Run a line as the page's reader would, with the test's image and its template for pods; returns what it says."""
    for name, value in values.items():
        line = line.replace(f"${name}", value)
    command, _, target = line.partition(" > ")
    words = in_namespace(shlex.split(command), namespace)
    if words[0] == "kubectl":
        return run_program([kubectl_program(), "--kubeconfig", person.environ["KUBECONFIG"], *words[1:]])
    assert words[0] == "edl", f"no test runs {line!r}"
    if words[1] == "submit" and "--image" in words:
        words[2:2] = ["--template", "pod.json"]
    said = person.run(*words[1:])
    if target:
        start = said.index("---\n")
        (person.folder / target.strip()).write_text(said[start : said.index("edl submit: ", start)])
    return said
