"""Files that people write: read as kubectl reads them, and slips are named that the API server would drop."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from edl.cli import main
from edl.cli.kube.submission.files import dump_manifests, load_template, read_manifests
from edl.cli.kube.submission.manifests import make_submission
from edl.cli.kube.submission.options import SubmitOptions
from edl.cli.kube.submission.sending import check_manifests
from edl.cli.kube.submission.spelling import RESOURCE_FIELDS
from edl.errors import SettingsError
from tests.cluster.machine import ROOT

yaml = pytest.importorskip("yaml", reason="the extra kubernetes is not installed")

OPTIONS = SubmitOptions(name="first", script="train.py", image="student:1", environment={"SEED": "7"})
SPELLED = (
    "12:30", "-1:30", "1:30.5", "1e-3", "5E4", "0o17", "017", "08", "0x1F", "0b11", "1_000", "2026-01-31", "10:00:00Z",
    "2026-01-31T12:00:00Z", "no", "Yes", "off", "true", ".5", "1.", "+1", "-0", "~", "null", "1.2.3", "1e", "e1", "+",
    "0644", "1e+2",
)  # fmt: skip


def test_files_are_read_as_by_kubectl(tmp_path: Path) -> None:
    kubectl = ROOT / ".tools/helm/kubectl"
    if not kubectl.exists():
        pytest.skip(".tools/helm/kubectl is not there: tools/kubernetes.sh fetches it")
    lines = "".join(f"  v{number}: {text}\n" for number, text in enumerate(SPELLED))
    path = tmp_path / "map.yaml"
    path.write_text(f"apiVersion: edl.io/v1alpha1\nkind: TeacherPool\nmetadata: {{name: a}}\nspec:\n{lines}")
    done = subprocess.run(
        [kubectl, "label", "--local", "-f", path, "-o", "json", "a=b"],
        capture_output=True, text=True, timeout=60, check=False, env={"KUBECONFIG": "/nonexistent"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (manifest,) = read_manifests(str(path))
    assert manifest["spec"] == json.loads(done.stdout)["spec"]


def test_yaml_has_no_sixties_and_no_dates(tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text("spec: {a: 12:30, b: 1e-3, c: 2026-01-31, d: '1', e: 017, f: -0x10}")
    read = load_template(str(path))["spec"]
    assert read == {"a": "12:30", "b": 0.001, "c": "2026-01-31", "d": "1", "e": 15, "f": -16}


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("maxReplcas", 8, r"'spec.maxReplcas' is no field.*'maxReplicas'"),
        ("max_replicas", 8, "did you mean 'maxReplicas'"),
        ("checkpiont", "s3://x", "did you mean 'checkpoint'"),
        ("zzz", 1, "there are activeDeadlineSeconds, "),
        ("master", {"enable": True}, r"spec.master.enable.*'enabled'"),
        ("template", {"spec": {}, "spce": {}}, "spec.template.spce"),
    ],
)
def test_misspelled_fields_are_named(path: str, value: object, words: str) -> None:
    """The API server drops them without a word: the job would run without its checkpoint."""
    job = make_submission(OPTIONS, None).job
    job["spec"][path] = value
    with pytest.raises(SettingsError, match=words):
        check_manifests([job])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda spec: spec["containers"][0].update(resource={}), "resource' is no field.*'resources'"),
        (lambda spec: spec["containers"][0].update(imagee="i"), "'image'"),
        (lambda spec: spec["containers"][0].update(resources={"limit": {}}), "resources.limit' is.*'limits'"),
        (lambda spec: spec["containers"][0].update(volume_mounts=[]), "'volumeMounts'"),
        (lambda spec: spec["containers"][0].update(limits={"nvidia.com/gpu": 1}), "'resources.limits'"),
        (lambda spec: spec["containers"][0].update(gpu=1), "'resources.limits'"),
        (lambda spec: spec["containers"][0].update(enviroment=[]), "'env'"),
        (lambda spec: spec.update(tolerationz=[]), "spec.template.spec.tolerationz.*'tolerations'"),
        (lambda spec: spec.update(nodeselector={}), "'nodeSelector'"),
    ],
)
def test_misspelled_fields_of_pods(change: Any, words: str) -> None:
    """A job without its GPUs trains, slowly, and nothing says why."""
    job = make_submission(OPTIONS, None).job
    change(job["spec"]["template"]["spec"])
    with pytest.raises(SettingsError, match=words):
        check_manifests([job])


def test_newer_fields_of_pods_are_taken() -> None:
    job = make_submission(OPTIONS, None).job
    spec = job["spec"]["template"]["spec"]
    spec |= {"hostnameOverride": "h", "quantumEntanglement": True}
    spec["containers"][0] |= {"restartPolicyRules": [], "zoom": 1, "resources": {"claims": []}}
    check_manifests([job])


@pytest.mark.parametrize("value", [False, 750, 0.001])
def test_texts_of_pods_are_texts(value: object) -> None:
    """YAML's `no` and 1e-3 in a template are refused by the API server only when the operator makes the pods."""
    for change in (
        lambda template: template["spec"]["containers"][0]["env"].append({"name": "RATE", "value": value}),
        lambda template: template["spec"]["containers"][0].update(command=["edl", value]),
        lambda template: template["spec"].update(nodeSelector={"gpu": value}),
        lambda template: template.update(metadata={"labels": {"team": value}}),
    ):
        job = make_submission(OPTIONS, None).job
        change(job["spec"]["template"])
        with pytest.raises(SettingsError, match=rf"{value}.*put it into quotes"):
            check_manifests([job])


def test_known_fields_are_the_crds() -> None:
    for path in (ROOT / "serving/kube/chart/files").glob("*.edl.io.yaml"):
        crd = yaml.safe_load(path.read_text())["spec"]
        spec = crd["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        found = {"spec": set(spec["properties"])}
        for name, field in spec["properties"].items():
            if "properties" in field:
                found[f"spec.{name}"] = set(field["properties"])
        assert RESOURCE_FIELDS[crd["names"]["kind"]] == found


def test_namespace_beside_its_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(dump_manifests(make_submission(OPTIONS, None).objects))
    assert main(["submit", "-nprod", "-f", "job.yaml", "--dry-run"]) == 0
    assert "namespace: prod" in capsys.readouterr().out
