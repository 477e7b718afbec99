"""What `edl submit` makes of its options, and what it refuses."""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from edl.cli import main
from edl.cli.kube.manifests import (
    MAX_SCRIPT_BYTES,
    LocalScript,
    dump_manifests,
    make_submission,
    read_manifests,
    read_script,
)
from edl.cli.kube.submit import check_manifests, parse_options
from edl.errors import SettingsError
from edl.master.kube.resources import parse_elastic_job, parse_teacher_pool
from tests.cluster.machine import ROOT

yaml = pytest.importorskip("yaml", reason="the extra kubernetes is not installed")


JOB = (
    "--name first --image student:1 --workers 1:8 --gpus 2 --memory 16Gi --cpu 2 --env SEED=7 --env B=x=y --env C= "
    "--checkpoint s3://bucket/first train.py --lr 0.1"
)


def submission(script: LocalScript | None = None, command: str | Sequence[str] = JOB) -> list[dict[str, Any]]:
    return make_submission(parse_options(command.split() if isinstance(command, str) else command), script)


def worker(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["template"]["spec"]["containers"][0]


def test_job_has_what_was_asked() -> None:
    script, job = made = submission(LocalScript("train.py", "train.py", b"print(1)\n"))
    assert script["data"] == {"train.py": "print(1)\n"}
    assert script["immutable"] is True, "a worker with rights on ConfigMaps would change it for all later pods"
    spec = job["spec"]
    assert spec["run"] == ["--nproc-per-node", "2", "/edl/script/train.py", "--lr", "0.1"]
    assert (spec["minReplicas"], spec["maxReplicas"], spec["checkpoint"]) == (1, 8, "s3://bucket/first")
    container = worker(job)
    assert container["image"] == "student:1"
    assert container["resources"] == {
        "limits": {"nvidia.com/gpu": "2", "memory": "16Gi"},
        "requests": {"cpu": "2", "memory": "16Gi"},
    }
    assert [(item["name"], item["value"]) for item in container["env"]] == [("SEED", "7"), ("B", "x=y"), ("C", "")]
    assert container["volumeMounts"] == [{"name": "edl-script", "mountPath": "/edl/script", "readOnly": True}]
    assert spec["template"]["spec"]["volumes"][0]["configMap"] == {"name": script["metadata"]["name"]}
    check_manifests(made)


def test_another_script_has_another_name() -> None:
    """A kubelet that has read an immutable ConfigMap gives its content to later pods, whatever the API has by then."""
    scripts = [("a.py", b"1"), ("a.py", b"2"), ("a.py", b"\xff"), ("b.py", b"1")]
    names = [LocalScript("x", *script).config_map_name("a") for script in scripts]
    assert len(set(names)) == len(scripts)
    assert names[0] == LocalScript("y", *scripts[0]).config_map_name("a"), "the same script has the same name"


def expand(text: str, environment: dict[str, str]) -> str:
    return re.sub(
        r"\$(\$)|\$\(([^)]*)\)",
        lambda found: found[1] or environment.get(found[2], found[0]),
        text,
    )


def test_dollars_are_the_users_own() -> None:
    texts = ("a$$b", "$(HOME_DIR)", "$(NONE)", "$HOME", "$$(HOME_DIR)", "$$$", "cost: 1$", "$(")
    variables = [f"--env=V{number}={text}" for number, text in enumerate(texts)]
    teachers = ["--teachers=digits=0:4", "--serve=digits=--text '$(HOME_DIR) $$'"]
    pool, job = submission(None, ["--image=i", f"--run={shlex.join(texts)}", *variables, *teachers, "train.py", *texts])

    def seen(found: list[str]) -> tuple[str, ...]:
        return tuple(expand(text, {"HOME_DIR": "/home"}) for text in found)

    assert seen(job["spec"]["run"]) == ("--nproc-per-node", "1", *texts, "train.py", *texts)
    assert seen([item["value"] for item in worker(job)["env"]][: len(texts)]) == texts
    assert seen(pool["spec"]["serve"]) == ("--text", "$(HOME_DIR) $$")


def test_teachers_have_a_pool() -> None:
    serve = "digits=--torch-factory 'teacher:make model' --input image:float32[1,8,8]"
    pools = ("--teachers", "digits=0:4", "--serve", serve, "--teacher-gpus", "1", "--store", "consul://h:8500")
    pool, job = made = submission(None, ["--image", "i", *pools, "t.py"])
    assert pool["spec"]["serve"] == ["--torch-factory", "teacher:make model", "--input", "image:float32[1,8,8]"]
    assert (pool["spec"]["minReplicas"], pool["spec"]["maxReplicas"]) == (0, 4)
    assert pool["spec"]["store"] == job["spec"]["store"] == "consul://h:8500"
    assert worker(pool)["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert worker(job)["env"] == [{"name": "EDL_SERVICE", "value": "digits"}]
    check_manifests(made)


TEMPLATE = """
kind: Pod
metadata: {labels: {team: vision}}
spec:
  tolerations: [{operator: Exists}]
  volumes: [{name: data, hostPath: {path: /data}}]
  containers:
  - {name: proxy, image: "proxy:1"}
  - {name: edl, image: old, env: [{name: SEED, value: "1"}, {name: D, value: "2"}]}
"""


def test_template_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text(TEMPLATE)
    _, job = submission(LocalScript("t.py", "t.py", b""), f"--image new --env SEED=7 --template {path} t.py")
    template = job["spec"]["template"]
    assert template["metadata"] == {"labels": {"team": "vision"}}
    pod = template["spec"]
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert [volume["name"] for volume in pod["volumes"]] == ["data", "edl-script"]
    assert pod["containers"][0] == {"name": "proxy", "image": "proxy:1"}
    assert pod["containers"][1]["image"] == "new"
    assert pod["containers"][1]["env"] == [{"name": "D", "value": "2"}, {"name": "SEED", "value": "7"}]
    path.write_text("containers: []")
    with pytest.raises(SettingsError, match="pod template"):
        submission(None, f"--template {path} t.py")


def test_script_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(b"\xff\xfe\x00")
    script = read_script(str(path))
    (data,) = script.config_map("a")["binaryData"].items()  # type: ignore[attr-defined]
    assert data == ("train.py", base64.b64encode(b"\xff\xfe\x00").decode())
    with pytest.raises(SettingsError, match="--script-in-image"):
        read_script(str(tmp_path / "none.py"))
    with pytest.raises(SettingsError, match="cannot be read"):
        read_script(str(tmp_path))
    largest = LocalScript("a.py", "a.py", b"\xff" * MAX_SCRIPT_BYTES)
    assert len(str(largest.config_map("a")).encode()) < 1024 * 1024, "as Base64, below the API's 1 MiB"
    path.write_bytes(b"#" * (MAX_SCRIPT_BYTES + 1))
    with pytest.raises(SettingsError, match="less than 1 MiB"):
        read_script(str(path))
    odd = tmp_path / "my train.py"
    odd.write_text("")
    with pytest.raises(SettingsError, match="rename"):
        read_script(str(odd))


def test_yaml_is_read_back(tmp_path: Path) -> None:
    script = "import os\n\n# ünïcode: 'x' \"y\"\nprint('a\\tb')\n\ttab\nend without newline"
    made = submission(LocalScript("train.py", "train.py", script.encode()))
    text = dump_manifests(made)
    assert list(yaml.safe_load_all(text)) == made
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert read_manifests(str(path)) == made


ODD_TEXTS = (
    "1e-3", "5E-4", "1e3", "0o17", "017", "0b1", "1_000", "12:30", "2024-01-01", ".5", "-.5", "+1", ".inf", ".NaN", "~",
    "y", "N", "yes", "Off", "TRUE", "null", "", " a ", "=", "<<", "*a", "&a", "!a", "%a", "@a", "`a", "a: b", "a #b",
    "a\nb", "\n", " a\n b\n\n", "\ta", "{}", "--lr", "-", "---", "'", '"', "\u2028", "é", "e5", "inf", "NaN",
    "/a", "x.y",
)  # fmt: skip


def test_doubtful_texts_are_quoted() -> None:
    """kubectl's reader has other numbers and booleans than PyYAML: nothing but words stands without quotes."""
    for text in ODD_TEXTS:
        (line,) = dump_manifests([{"a": text}]).splitlines()[1:2]
        plain = line.removeprefix("a: ")[:1] not in ("'", '"', "|")
        assert plain == (text in ("e5", "inf", "NaN", "/a", "x.y")), line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no manifest"),
        ("a: [", "not a YAML"),
        ("!!python/object/apply:os.system ['true']", "not a YAML"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: a}", "v1 Pod"),
        ("a: .nan", "not a YAML"),
        ("a: &a [*a]", "Circular reference"),
        ("apiVersion: edl.io/v1alpha1\nkind: ElasticJob\nspec: {}", "metadata.name"),
    ],
)
def test_file_that_cannot_be(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=words):
        read_manifests(str(path))


DRY = ["--image", "i", "--dry-run", "--script-in-image"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("train.py", "--image is missing"),
        ("--image i --memory lots t.py", "16Gi"),
        ("-f job.yaml --image i", "omit one of the two"),
        ("--image i --timeout 3s t.py", "requires --wait or --follow"),
        ("--image i --imgae j t.py", "unknown option '--imgae'; did you mean '--image'"),
        *((f"--workers {text} t.py", "'8:1'" if text == "8:1" else "MIN:MAX") for text in ("8:1", "-1", "1:", "٣")),
        ("--workers 0 t.py", "at least 1"),
        *((f"--name {name} t.py", "--name") for name in ("A", "a-", "a.b", "a" * 53)),
        *((f"--env {text} t.py", "--env") for text in ("A", "1A=2", "=2", "A=1 --env A=2")),
        ("--teachers digits=1:2 --teachers digits t.py", "twice"),
        ("--teachers digits=2:1 t.py", "--teachers 'digits=2:1': the minimum"),
        ("--teachers digits=1:2 t.py", "edl scale pool/digits auto --min 1 --max 2"),
        ("--teachers digits --serve digits=--callable t.py", "--teachers digits=0:4"),
        ("--serve digits=--callable t.py", "--teachers digits=0:4"),
        ("--teachers digits=0:1 --serve digits=--a' t.py", "quotation"),
        ("--teachers Digits=0:1 t.py", "a-z"),
        ("--run=--max-restart=3 t.py", "--run: unknown option '--max-restart'; did you mean '--max-restarts'"),
        ("--teachers d=0:1 --serve d=--callabel=a:b t.py", "--serve d=…: unknown option '--callabel'; did you mean"),
        ("--store sqlite:///tmp/a t.py", "each pod would have its own"),
        ("--store ed1://a:1 t.py", "unknown scheme 'ed1'"),
        ("--checkpoint foo://a t.py", "spec.checkpoint is 'foo://a': no storage has the scheme 'foo'"),
        ("--teachers d=0:1 --serve d=--bogus t.py", "--serve d=…: unknown option '--bogus'"),
    ],
)
def test_submit_refuses(
    arguments: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What would fail in the pod is refused here, before anything is made."""
    pytest.importorskip("torch", reason="--run is checked by torchrun's own parser")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("")
    (tmp_path / "job.yaml").write_text(dump_manifests(submission()))
    whole = arguments.startswith(("train.py", "-f", "--image"))
    assert main(["submit", *([] if whole else DRY), *arguments.split(" ")]) == 2
    assert words in capsys.readouterr().err


def test_dry_run_asks_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    (tmp_path / "My_train.py").write_text("print(1)\n")
    command = ["submit", "--image", "i", "--dry-run", "-n", "research", "My_train.py", "--dry-run", "-f", "x"]
    assert main(command) == 0
    shown = capsys.readouterr()
    script, job = yaml.safe_load_all(shown.out)
    assert job["metadata"]["namespace"] == script["metadata"]["namespace"] == "research"
    assert job["metadata"]["name"].startswith("my-train-")
    assert job["spec"]["run"][2:] == ["/edl/script/My_train.py", "--dry-run", "-f", "x"], "the script's own options"
    assert "no other file" in shown.err
    (tmp_path / "job.yaml").write_text(dump_manifests(submission()))
    assert main(["submit", "-nprod", "-f", "job.yaml", "--dry-run"]) == 0
    assert "namespace: prod" in capsys.readouterr().out


QUOTES = "0.001.*in quotes"


@pytest.mark.parametrize(
    ("slip", "words"),
    [
        (lambda job: job["spec"].update(max_replicas=8), "did you mean 'maxReplicas'"),
        (lambda job: job.update(sepc={}), "did you mean 'spec'"),
        (lambda job: job["spec"].update(zzz=1), "known fields: activeDeadlineSeconds, "),
        (lambda job: job["spec"].update(master={"enable": True}), r"spec.master.enable.*'enabled'"),
        (lambda job: job["spec"]["template"].update(spce={}), "spec.template.spce.*did you mean 'spec'"),
        (lambda job: job["spec"]["template"]["spec"].update(nodeselector={}), "'nodeSelector'"),
        (lambda job: worker(job).update(imagee="i"), "'image'"),
        (lambda job: worker(job).update(gpu=1), "'resources.limits'"),
        (lambda job: worker(job).update(resources={"limit": {}}), "resources.limit' is.*'limits'"),
        (
            lambda job: worker(job).update(resources={"limits": {"memory": "1GB"}}),
            "resources.limits.memory is '1GB': must be a quantity, such as 2, 500m or 16Gi",
        ),
        (
            lambda job: worker(job).update(volumeMounts=[{"mountpath": "/a"}]),
            r"volumeMounts\[0\].mountpath.*'mountPath'",
        ),
        (lambda job: worker(job)["env"].append({"name": "RATE", "value": 0.001}), QUOTES),
        (lambda job: worker(job).update(command=["edl", 0.001]), QUOTES),
        (lambda job: job["spec"]["template"]["spec"].update(nodeSelector={"gpu": 0.001}), QUOTES),
        (lambda job: job["spec"]["template"].update(metadata={"labels": {"team": False}}), "False.*in quotes"),
    ],
)
def test_slips_are_named(slip: Any, words: str) -> None:
    """The API server drops such fields without a word, and refuses numbers only when the operator makes the pods."""
    (job,) = submission()
    slip(job)
    with pytest.raises(SettingsError, match=words):
        check_manifests([job])


def test_amounts_and_new_fields_are_no_slips() -> None:
    (job,) = submission()
    worker(job).update(resources={"limits": {"cpu": 2}}, fieldOfTomorrow=1)
    check_manifests([job])


def test_known_fields_are_the_crds() -> None:
    """`edl submit` refuses what the parser does not read, and the API server drops what the CRD lacks."""
    for path in (ROOT / "serving/kube/chart/files").glob("*.edl.io.yaml"):
        crd = yaml.safe_load(path.read_text())["spec"]
        fields = crd["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
        parts = {name: field["properties"] for name, field in fields.items() if "properties" in field}
        spec = {"bogus": 1} | {name: {"bogus": 1} for name in parts if name != "template"}
        parse = parse_elastic_job if crd["names"]["kind"] == "ElasticJob" else parse_teacher_pool
        found = parse({"metadata": {"name": "a"}, "spec": spec}, "edl://a:1", strict=True)
        assert isinstance(found, tuple)
        words = "; ".join(problem.message for problem in found)
        for known in (fields, *(parts[name] for name in spec if name in parts)):
            assert f"known fields: {', '.join(sorted(known))}" in words
