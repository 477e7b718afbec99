"""Files that people write: read as kubectl reads them, and slips are named that the API server would drop."""

from __future__ import annotations

from typing import Any

import pytest

from edl.cli.kube.submission.manifests import make_submission
from edl.cli.kube.submission.options import SubmitOptions
from edl.cli.kube.submission.sending import check_manifests
from edl.cli.kube.submission.spelling import RESOURCE_FIELDS
from edl.errors import SettingsError
from tests.cluster.machine import ROOT

yaml = pytest.importorskip("yaml", reason="the extra kubernetes is not installed")

OPTIONS = SubmitOptions(name="first", script="train.py", image="student:1", environment={"SEED": "7"})


def container(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("slip", "words"),
    [
        (lambda job: job["spec"].update(max_replicas=8), "did you mean 'maxReplicas'"),
        (lambda job: job["spec"].update(zzz=1), "there are activeDeadlineSeconds, "),
        (lambda job: job["spec"].update(master={"enable": True}), r"spec.master.enable.*'enabled'"),
        (lambda job: job["spec"]["template"].update(spce={}), "spec.template.spce"),
        (lambda job: job["spec"]["template"]["spec"].update(nodeselector={}), "'nodeSelector'"),
        (lambda job: container(job).update(imagee="i"), "'image'"),
        (lambda job: container(job).update(gpu=1), "'resources.limits'"),
        (lambda job: container(job).update(resources={"limit": {}}), "resources.limit' is.*'limits'"),
    ],
)
def test_misspelled_fields_are_named(slip: Any, words: str) -> None:
    """The API server drops them without a word: the job would run without its checkpoint, or its GPUs."""
    job = make_submission(OPTIONS, None).job
    slip(job)
    with pytest.raises(SettingsError, match=words):
        check_manifests([job])


@pytest.mark.parametrize(
    "slip",
    [
        lambda job, value: container(job)["env"].append({"name": "RATE", "value": value}),
        lambda job, value: container(job).update(command=["edl", value]),
        lambda job, value: job["spec"]["template"]["spec"].update(nodeSelector={"gpu": value}),
        lambda job, value: job["spec"]["template"].update(metadata={"labels": {"team": value}}),
    ],
)
def test_texts_of_pods_are_texts(slip: Any) -> None:
    """YAML's `no` and 1e-3 in a template are refused by the API server only when the operator makes the pods."""
    for value in (False, 0.001):
        job = make_submission(OPTIONS, None).job
        slip(job, value)
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
