"""What `edl submit` makes of its options, and what it refuses."""

from __future__ import annotations

import base64
import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edl.cli import main
from edl.cli.kube.submission.files import dump_manifests, load_template, read_manifests
from edl.cli.kube.submission.manifests import make_submission
from edl.cli.kube.submission.options import (
    ReplicaRange,
    SubmitOptions,
    check_name,
    parse_environment,
    parse_teachers,
)
from edl.cli.kube.submission.script import MAX_SCRIPT_BYTES, LocalScript, read_script
from edl.cli.kube.submission.sending import check_manifests
from edl.cli.kube.submission.spelling import RESOURCE_FIELDS
from edl.errors import SettingsError
from tests.cluster.machine import ROOT

yaml = pytest.importorskip("yaml", reason="the extra kubernetes is not installed")


OPTIONS = SubmitOptions(
    name="first",
    script="train.py",
    arguments=("--lr", "0.1"),
    image="student:1",
    workers=ReplicaRange(1, 8),
    gpus=2,
    memory="16Gi",
    cpu="2",
    environment={"SEED": "7"},
    checkpoint="s3://bucket/first",
)


def worker(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["template"]["spec"]["containers"][0]


def test_job_has_what_was_asked() -> None:
    made = make_submission(OPTIONS, LocalScript("train.py", "train.py", b"print(1)\n"))
    assert made.config_map is not None
    assert made.config_map["data"] == {"train.py": "print(1)\n"}
    assert made.config_map["immutable"] is True, "a worker with rights on ConfigMaps would change it for all later pods"
    spec = made.job["spec"]
    assert spec["run"] == ["--nproc-per-node", "2", "/edl/script/train.py", "--lr", "0.1"]
    assert (spec["minReplicas"], spec["maxReplicas"], spec["checkpoint"]) == (1, 8, "s3://bucket/first")
    container = worker(made.job)
    assert container["image"] == "student:1"
    assert container["resources"] == {
        "limits": {"nvidia.com/gpu": "2", "memory": "16Gi"},
        "requests": {"cpu": "2", "memory": "16Gi"},
    }
    assert container["env"] == [{"name": "SEED", "value": "7"}]
    assert container["volumeMounts"] == [{"name": "edl-script", "mountPath": "/edl/script", "readOnly": True}]
    assert made.job["spec"]["template"]["spec"]["volumes"][0]["configMap"] == {
        "name": made.config_map["metadata"]["name"]
    }
    check_manifests(list(made.objects))


def test_another_script_has_another_name() -> None:
    """A kubelet that has read an immutable ConfigMap gives its content to later pods, whatever the API has by then."""

    def name(script: LocalScript) -> str:
        made = make_submission(OPTIONS, script)
        assert made.config_map is not None
        return str(made.config_map["metadata"]["name"])

    scripts = [("a.py", b"1"), ("a.py", b"2"), ("a.py", b"\xff"), ("b.py", b"1")]
    names = [name(LocalScript("x", *script)) for script in scripts]
    assert len(set(names)) == len(scripts)
    assert names[0] == name(LocalScript("y", *scripts[0])), "the same script has the same name"


def expand(text: str, environment: dict[str, str]) -> str:
    return re.sub(
        r"\$(\$)|\$\(([^)]*)\)",
        lambda found: found[1] or environment.get(found[2], found[0]),
        text,
    )


def test_dollars_are_the_users_own() -> None:
    texts = ("a$$b", "$(HOME_DIR)", "$(NONE)", "$HOME", "$$(HOME_DIR)", "$$$", "cost: 1$", "$(")
    pools = parse_teachers(["digits=0:4"], ["digits=--text '$(HOME_DIR) $$'"])
    options = replace(OPTIONS, arguments=texts, run=texts, command=texts, teachers=pools)
    options = replace(options, environment={f"V{number}": text for number, text in enumerate(texts)})
    made = make_submission(options, None)

    def seen(found: list[str]) -> tuple[str, ...]:
        return tuple(expand(text, {"HOME_DIR": "/home"}) for text in found)

    assert seen(made.job["spec"]["run"]) == ("--nproc-per-node", "2", *texts, "train.py", *texts)
    assert seen(worker(made.job)["command"]) == texts
    assert seen([item["value"] for item in worker(made.job)["env"]][: len(texts)]) == texts
    assert seen(made.pools[0]["spec"]["serve"]) == ("--text", "$(HOME_DIR) $$")


def test_teachers_have_a_pool() -> None:
    pools = parse_teachers(["digits=0:4"], ["digits=--torch-factory 'teacher:make model' --input image:float32[1,8,8]"])
    assert pools[0].serve == ("--torch-factory", "teacher:make model", "--input", "image:float32[1,8,8]")
    options = SubmitOptions(name="a", script="t.py", image="i", teachers=pools, teacher_gpus=1, store="consul://h:8500")
    made = make_submission(options, None)
    (pool,) = made.pools
    assert pool["spec"]["minReplicas"] == 0
    assert pool["spec"]["maxReplicas"] == 4
    assert pool["spec"]["store"] == made.job["spec"]["store"] == "consul://h:8500"
    assert worker(pool)["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert worker(made.job)["env"] == [{"name": "EDL_SERVICE", "value": "digits"}]
    check_manifests(list(made.objects))
    assert made.objects[-1] is made.job, "the job comes last, when all that it needs is there"


def test_template_is_kept() -> None:
    template: dict[str, object] = {
        "metadata": {"labels": {"team": "vision"}},
        "spec": {
            "tolerations": [{"operator": "Exists"}],
            "volumes": [{"name": "data", "hostPath": {"path": "/data"}}],
            "containers": [
                {"name": "proxy", "image": "proxy:1"},
                {"name": "edl", "image": "old", "env": [{"name": "SEED", "value": "1"}, {"name": "B", "value": "2"}]},
            ],
        },
    }
    options = SubmitOptions(name="a", script="t.py", image="new", environment={"SEED": "7"}, template=template)
    made = make_submission(options, LocalScript("t.py", "t.py", b""))
    pod = made.job["spec"]["template"]["spec"]
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert [volume["name"] for volume in pod["volumes"]] == ["data", "edl-script"]
    assert pod["containers"][0] == {"name": "proxy", "image": "proxy:1"}
    assert pod["containers"][1]["image"] == "new"
    assert pod["containers"][1]["env"] == [{"name": "B", "value": "2"}, {"name": "SEED", "value": "7"}]
    assert template["spec"]["containers"][1]["image"] == "old", "the caller's template is not changed"  # type: ignore[index]


@pytest.mark.parametrize(
    ("spelled", "lowest", "words"),
    [
        ("8:1", 1, "not below it"),
        ("0", 1, "at least 1"),
        ("-1", 0, "MIN:MAX"),
        ("1:", 1, "MIN:MAX"),
        ("٣", 1, "MIN:MAX"),
    ],
)
def test_range_that_cannot_be(spelled: str, lowest: int, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        ReplicaRange.parse(spelled, "--workers", lowest)
    assert repr(spelled) in str(caught.value)


@pytest.mark.parametrize("name", ["", "A", "a-", "a.b", "a" * 53, "a\n"])
def test_name_that_cannot_be(name: str) -> None:
    with pytest.raises(SettingsError, match="--name"):
        check_name(name)


def test_environment_is_checked() -> None:
    assert parse_environment(["A=1", "B=x=y", "C="]) == {"A": "1", "B": "x=y", "C": ""}
    for wrong in (["A"], ["1A=2"], ["=2"], ["A=1", "A=2"]):
        with pytest.raises(SettingsError, match="--env"):
            parse_environment(wrong)


@pytest.mark.parametrize(
    ("teachers", "serve", "words"),
    [
        (["digits=1:2", "digits"], [], "twice"),
        (["digits"], ["digits=--callable a:b"], "how many"),
        ([], ["digits=--callable a:b"], "--teachers digits=0:4"),
        (["digits=0:1"], ["digits=--a 'b"], "quotation"),
        (["Digits=0:1"], [], "a-z"),
    ],
)
def test_teachers_that_cannot_be(teachers: list[str], serve: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        parse_teachers(teachers, serve)


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
    made = make_submission(OPTIONS, LocalScript("train.py", "train.py", script.encode()))
    text = dump_manifests(made.objects)
    assert list(yaml.safe_load_all(text)) == list(made.objects)
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert read_manifests(str(path)) == list(made.objects)


PAIRS = list(itertools.pairwise("abcdefghij"))

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
        ("a: [", "no YAML"),
        ("!!python/object/apply:os.system ['true']", "no YAML"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: a}", "v1 Pod"),
        ("a: .nan", "no YAML"),
        ("a: &a [*a]", "contains itself"),
        ("a: &a [1, 1]\n" + "".join(f"{y}: &{y} [{f'*{x},' * 9}]\n" for x, y in PAIRS), "too large"),
        (
            "a: &a {x: 1}\n" + "".join(f"{y}: &{y} {{<<: [{f'*{x},' * 9}]}}\n" for x, y in PAIRS),
            "too large",
        ),
        ("apiVersion: edl.io/v1alpha1\nkind: ElasticJob\nspec: {}", "metadata.name"),
    ],
)
def test_file_that_cannot_be(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=words):
        read_manifests(str(path))


def test_spec_is_checked_before_sending() -> None:
    job = make_submission(OPTIONS, None).job
    job["spec"]["minReplicas"] = 9
    with pytest.raises(SettingsError, match=r"ElasticJob 'first': spec.minReplicas is 9.*maxReplicas"):
        check_manifests([job])


def test_template_file(tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text("kind: Pod\nmetadata: {labels: {a: b}}\nspec: {containers: []}\n")
    assert load_template(str(path)) == {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": []}}
    path.write_text("containers: []")
    with pytest.raises(SettingsError, match="pod template"):
        load_template(str(path))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train.py"], 2, "--image is missing"),
        (["--image", "i", "--memory", "lots", "t.py"], 2, "16Gi"),
        (["-f", "job.yaml", "--image", "i"], 2, "leave either out"),
        (["--image", "i", "--timeout", "3", "t.py"], 2, "--wait and --follow"),
        (["--image", "i", "--serve", "a=--x", "--script-in-image", "t.py"], 2, "--teachers a=0:4"),
    ],
)
def test_submit_refuses(
    arguments: list[str], code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("")
    (tmp_path / "job.yaml").write_text(dump_manifests(make_submission(OPTIONS, None).objects))
    assert main(["submit", *arguments]) == code
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
    assert "that file alone" in shown.err
    (tmp_path / "job.yaml").write_text(dump_manifests(make_submission(OPTIONS, None).objects))
    assert main(["submit", "-nprod", "-f", "job.yaml", "--dry-run"]) == 0
    assert "namespace: prod" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("slip", "words"),
    [
        (lambda job: job["spec"].update(max_replicas=8), "did you mean 'maxReplicas'"),
        (lambda job: job["spec"].update(zzz=1), "there are activeDeadlineSeconds, "),
        (lambda job: job["spec"].update(master={"enable": True}), r"spec.master.enable.*'enabled'"),
        (lambda job: job["spec"]["template"].update(spce={}), "spec.template.spce"),
        (lambda job: job["spec"]["template"]["spec"].update(nodeselector={}), "'nodeSelector'"),
        (lambda job: worker(job).update(imagee="i"), "'image'"),
        (lambda job: worker(job).update(gpu=1), "'resources.limits'"),
        (lambda job: worker(job).update(resources={"limit": {}}), "resources.limit' is.*'limits'"),
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
        lambda job, value: worker(job)["env"].append({"name": "RATE", "value": value}),
        lambda job, value: worker(job).update(command=["edl", value]),
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
