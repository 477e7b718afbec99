"""What Helm makes of the chart, without a cluster."""

from __future__ import annotations

import importlib.util
import itertools
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from edl.master.kube.jobs.gangs import GROWTH_CLASS
from edl.master.kube.resources import ElasticJob, parse_elastic_job
from tests.cluster.api import run_program
from tests.cluster.machine import ROOT
from tests.cluster.operator_process import CHART, render_chart

IMAGE = ("--set", "image.repository=registry.example.com/edl/operator")
EVERYTHING = (
    *IMAGE,
    *("--set", "capacity.enabled=true,grafana.enabled=true,schedulers.volcano=true,schedulers.kai=true"),
    *("--set", "dashboard.enabled=true,dashboard.tokenSecret=t,dashboard.tlsSecret=s"),
    *("--set", "watchNamespaces={red,blue},operator.priorityClassName=high,image.pullSecrets={mine}"),
    *("--api-versions", "monitoring.coreos.com/v1/PodMonitor"),
    *("--api-versions", "kueue.x-k8s.io/v1beta1/WorkloadPriorityClass"),
)
UNKNOWN = ("PodMonitor", "WorkloadPriorityClass")  # not Kubernetes' own
OPERATOR_RIGHTS = {
    "": {"pods": "create delete list watch", "events": "create get list patch"},
    "apps": {"deployments/scale": "get patch", "statefulsets/scale": "get patch"},
    "edl.io": {
        "elasticjobs": "delete get list watch",
        "elasticjobs/status": "patch",
        "teacherpools": "get list watch",
        "teacherpools/status": "patch",
    },
    "policy": {"poddisruptionbudgets": "create delete patch"},
}
"""As documented in docs/kubernetes-operators.md; each is used by `edl.master.kube.operator`."""
BOUND_VERBS = {"get", "list", "watch", "create", "update", "patch", "delete"}


@pytest.fixture
def helm() -> str:
    """Helm 3; where another version is in question, it is named."""
    program = ROOT / ".tools/helm/helm3"
    if not program.exists():
        pytest.skip(f"{program} is not there: tools/kubernetes.sh fetches it")
    return str(program)


def _objects(helm: str, *options: str, namespace: str = "edl") -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all(render_chart(namespace, *options, helm=helm)) if item]


def _pod_specs(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item["spec"]["template"]["spec"] for item in objects if item["kind"] == "Deployment"]


@pytest.mark.parametrize("version", ["1.25", "1.31", "1.37"])
@pytest.mark.parametrize("options", [IMAGE, EVERYTHING], ids=["default", "everything"])
def test_newer_apis_take_it(helm: str, options: tuple[str, ...], version: str) -> None:
    objects = _objects(helm, *options)
    assert {"Deployment", "Role", "CustomResourceDefinition"} <= {item["kind"] for item in objects}
    for item in objects:
        if item["kind"] not in UNKNOWN:
            kubernetes_validate.validate(item, version, strict=True)


def test_versions_render_alike() -> None:
    programs = [str(ROOT / f".tools/helm/helm{version}") for version in (3, 4)]
    if not all(Path(program).exists() for program in programs):
        pytest.skip(".tools/helm is not there: tools/kubernetes.sh fetches it")
    old, new = (_objects(program, *EVERYTHING) for program in programs)
    assert sorted(old, key=str) == sorted(new, key=str)
    for program in programs:
        assert "0 chart(s) failed" in run_program([program, "lint", "--strict", str(CHART), *IMAGE])


def test_crds_are_kept(helm: str) -> None:
    def crds(*options: str) -> dict[str, Any]:
        objects = _objects(helm, *IMAGE, *options)
        return {item["metadata"]["name"]: item for item in objects if item["kind"] == "CustomResourceDefinition"}

    kept = crds()
    assert set(kept) == {"elasticjobs.edl.io", "teacherpools.edl.io"}
    for name, item in kept.items():
        assert item["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}, name
        written = yaml.safe_load((CHART / f"files/{name}.yaml").read_text())
        assert {**item, "metadata": written["metadata"]} == written
    assert all("annotations" not in item["metadata"] for item in crds("--set", "crds.keep=false").values())
    assert crds("--set", "crds.install=false") == {}


def test_pods_are_restricted(helm: str) -> None:
    specs = _pod_specs(_objects(helm, *EVERYTHING))
    assert len(specs) == 2
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"]
            assert container["resources"]["limits"]["memory"]
            assert {"livenessProbe", "readinessProbe"} <= set(container)


def test_roles_are_narrow(helm: str) -> None:
    objects = _objects(helm, *EVERYTHING)
    rules = [(item["metadata"]["name"], rule) for item in objects for rule in item.get("rules", ())]
    for name, rule in rules:
        assert set(rule["verbs"]) <= BOUND_VERBS, name
        assert "*" not in rule["resources"] + rule["apiGroups"]
        assert not {"secrets", "serviceaccounts", "roles", "rolebindings", "pods/exec"} & set(rule["resources"])
    bound = [item["roleRef"]["name"] for item in objects if item["kind"] == "ClusterRoleBinding"]
    assert bound == ["edl-capacity"]
    (capacity,) = (rule for name, rule in rules if name == "edl-capacity")
    assert capacity == {"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list", "watch"]}
    assert not any(item["metadata"]["name"] == "edl-capacity" for item in _objects(helm, *IMAGE))


def test_rights_are_these(helm: str) -> None:
    """A right that is added or taken back is so on purpose."""
    objects = _objects(helm, "--set", "operator.enabled=false", "--show-only", "templates/rbac.yaml")
    (role,) = (item for item in objects if item["kind"] == "Role")
    found: dict[str, dict[str, str]] = {}
    for rule in role["rules"]:
        for group, resource in itertools.product(rule["apiGroups"], rule["resources"]):
            verbs = found.setdefault(group, {}).get(resource, "").split()
            found[group][resource] = " ".join(sorted({*verbs, *rule["verbs"]}))
    assert found == OPERATOR_RIGHTS


def test_one_operator(helm: str) -> None:
    """Never two of one release, and no election: one ends before the next begins, also at an upgrade."""
    deployments = {item["metadata"]["name"]: item["spec"] for item in _objects(helm, *IMAGE) if _is(item, "apps")}
    assert deployments["edl-operator"]["replicas"] == 1
    assert deployments["edl-operator"]["strategy"] == {"type": "Recreate"}
    # Below -10 a cluster autoscaler neither buys nor keeps nodes for teachers, and they preempt nobody.
    (found,) = (item for item in _objects(helm, *IMAGE) if item["kind"] == "PriorityClass")
    assert (found["metadata"]["name"], found["preemptionPolicy"]) == ("edl-teacher", "Never")
    assert found["value"] < -10
    assert not found.get("globalDefault")


def test_second_release_shares_nothing(helm: str) -> None:
    """With the options of the page; Helm would refuse objects of the whole cluster that are another release's."""
    page = (ROOT / "docs/kubernetes-operators.md").read_text()
    text = page.partition("**A second release in one cluster**")[2].partition("\n\n")[0]
    first, capacity = re.findall(r"`(?:--set )?([\w.]+=[\w.,=-]+)`", text)
    options = ("--set", f"{first},capacity.enabled=true,{capacity},watchNamespaces={{green}}")
    apis = [word for version in ("v1beta1", "v1beta2") for word in ("--api-versions", _growth_api(version))]
    both = [_objects(helm, *EVERYTHING, *apis), _objects(helm, *IMAGE, *options, *apis, namespace="two")]
    names = [
        {(item["kind"], item["metadata"]["name"]) for item in objects if "namespace" not in item["metadata"]}
        for objects in both
    ]
    assert names[1] == {("ClusterRoleBinding", "edl-capacity-two")}
    assert not names[0] & names[1]


def _growth_api(version: str) -> str:
    return f"kueue.x-k8s.io/{version}/WorkloadPriorityClass"


@pytest.mark.parametrize(("served", "made"), [(["v1beta1"], "v1beta1"), (["v1beta1", "v1beta2"], "v1beta2")])
def test_growth_class_of_any_kueue(helm: str, served: list[str], made: str) -> None:
    apis = [word for version in served for word in ("--api-versions", _growth_api(version))]
    (found,) = (item for item in _objects(helm, *IMAGE, *apis) if item["kind"] == "WorkloadPriorityClass")
    assert found["apiVersion"] == f"kueue.x-k8s.io/{made}"
    assert found["metadata"]["name"] == GROWTH_CLASS
    assert found["value"] < 0


@pytest.mark.parametrize(("option", "group"), [("volcano", "scheduling.volcano.sh"), ("kai", "scheduling.run.ai")])
def test_pod_groups_may_be_made(helm: str, option: str, group: str) -> None:
    """The operator has the rights for the PodGroups that it makes, where the chart is told of their scheduler."""
    for options, verbs in (((), []), (("--set", f"schedulers.{option}=true"), [["create", "delete", "patch"]])):
        roles = [item for item in _objects(helm, *IMAGE, *options) if item["kind"] == "Role"]
        rules = [rule for role in roles for rule in role["rules"] if group in rule["apiGroups"]]
        assert [sorted(rule["verbs"]) for rule in rules if rule["resources"] == ["podgroups"]] == verbs


def _is(item: dict[str, Any], group: str) -> bool:
    return str(item["apiVersion"]).startswith(f"{group}/")


def test_roles_follow_namespaces(helm: str) -> None:
    objects = _objects(helm, *EVERYTHING)
    bindings = [
        item for item in objects if item["kind"] == "RoleBinding" and item["metadata"]["name"] == "edl-operator"
    ]
    assert {item["metadata"]["namespace"] for item in bindings} == {"red", "blue"}
    assert all(item["subjects"][0]["namespace"] == "edl" for item in bindings)
    (spec,) = (spec for spec in _pod_specs(objects) if spec["containers"][0]["name"] == "operator")
    assert {"--namespace=red", "--namespace=blue"} <= set(spec["containers"][0]["args"])
    (spec,) = _pod_specs(_objects(helm, *IMAGE, namespace="mine"))
    assert {"--namespace=mine", "--store=kubernetes://mine"} <= set(spec["containers"][0]["args"])


def test_page_shows_each_namespace(helm: str) -> None:
    objects = _objects(helm, *EVERYTHING)
    (page,) = (spec["containers"][0] for spec in _pod_specs(objects) if spec["containers"][0]["name"] == "dashboard")
    assert [item for item in page["args"] if item.startswith("--kube")] == ["--kube=red", "--kube=blue"]
    for kind in ("Role", "RoleBinding"):
        found = [item for item in objects if item["kind"] == kind and item["metadata"]["name"] == "edl-dashboard"]
        assert {item["metadata"]["namespace"] for item in found} == {"red", "blue"}, kind


@pytest.mark.parametrize(
    ("value", "argument"),
    [
        ("store=consul+https://consul:8501", "--store=consul+https://consul:8501"),
        ("store=etcd://a:2379\\,b:2379", "--store=etcd://a:2379,b:2379"),
        ("operator.allowStores={consul://consul:8500,etcd+https://}", "--allow-store=etcd+https://"),
    ],
)
def test_stores_are_passed_on(helm: str, value: str, argument: str) -> None:
    objects = _objects(helm, *IMAGE, "--set", value)
    (spec,) = _pod_specs(objects)
    assert argument in spec["containers"][0]["args"]
    leases = any(item["metadata"]["name"] == "edl-discovery" for item in objects)
    assert leases == (not value.startswith("store=")), "another store needs no leases"


@pytest.mark.parametrize(
    ("namespaces", "store", "expected"),
    [
        ("edl,edl", "", "edl"),
        ("red,blue", "", "edl"),
        ("edl,red", "kubernetes://meet", "meet"),
    ],
)
def test_store_has_its_role(helm: str, namespaces: str, store: str, expected: str) -> None:
    objects = _objects(helm, *IMAGE, "--set", f"watchNamespaces={{{namespaces}}},store={store}")
    (role,) = (item for item in objects if item["kind"] == "Role" and item["metadata"]["name"] == "edl-discovery")
    assert role["metadata"]["namespace"] == expected
    (spec,) = _pod_specs(objects)
    assert f"--store=kubernetes://{expected}" in spec["containers"][0]["args"]


def _page_monitor(helm: str, page: str) -> dict[str, Any] | None:
    """The PodMonitor that takes the page, of those whose selector does; None without."""
    api = ("--api-versions", "monitoring.coreos.com/v1/PodMonitor")
    objects = _objects(helm, *IMAGE, *api, "--set", f"dashboard.enabled=true{page}")
    (labels,) = (
        item["spec"]["template"]["metadata"]["labels"]
        for item in objects
        if item["kind"] == "Deployment" and item["metadata"]["name"] == "edl-dashboard"
    )
    found = [
        item["spec"]["podMetricsEndpoints"]
        for item in objects
        if item["kind"] == "PodMonitor" and item["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ]
    assert len(found) <= 1, "the page is scraped twice"
    return dict(found[0][0]) if found else None


def test_page_is_scraped_with_token(helm: str) -> None:
    plain = _page_monitor(helm, "")
    assert plain is not None
    assert not {"scheme", "authorization"} & set(plain)
    guarded = ",dashboard.tokenSecret=t,dashboard.tlsSecret=s"
    assert _page_monitor(helm, guarded) is None, "each scrape would be refused"
    monitor = _page_monitor(helm, f"{guarded},podMonitor.tokenSecret=scrape")
    assert monitor is not None
    assert monitor["scheme"] == "https"
    assert monitor["authorization"] == {"credentials": {"name": "scrape", "key": "token"}}
    assert monitor["tlsConfig"] == {
        "ca": {"secret": {"name": "s", "key": "tls.crt"}},
        "serverName": "edl-dashboard.edl.svc",
    }
    monitor = _page_monitor(helm, ",dashboard.tlsSecret=s,podMonitor.tlsConfig.serverName=page")
    assert monitor is not None
    assert monitor["tlsConfig"] == {"serverName": "page"}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_optional_kinds_need_their_api(helm: str, kind: str) -> None:
    assert not any(item["kind"] == kind for item in _objects(helm, *IMAGE))
    assert any(item["kind"] == kind for item in _objects(helm, *EVERYTHING))


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("image.repository=", "no image of EDL is published"),
        ("image.repositry=x", "repositry"),
        ("operator.port=70000", "operator"),
        ("store=edl://host:29400", "store"),
        ("operator.allowStores={consul://a@b}", "allowStores"),
        ("watchNamespaces={A_b}", "watchNamespaces"),
        ("watchNamespaces={edl,red}", "store=kubernetes://NAMESPACE"),
        ("capacity.enabled=maybe", "capacity"),
        ("dashboard.enabled=true,dashboard.tokenSecret=t", "dashboard.tlsSecret=SECRET"),
    ],
)
def test_bad_values_are_refused(helm: str, option: str, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        render_chart("edl", *IMAGE, "--set", option, helm=helm)


def test_tokens_behind_a_proxy(helm: str) -> None:
    extra = "dashboard.enabled=true,dashboard.tokenSecret=t,dashboard.extraArgs={--allow-insecure-tokens}"
    specs = _pod_specs(_objects(helm, *IMAGE, "--set", extra))
    (page,) = (spec["containers"][0]["args"] for spec in specs if spec["containers"][0]["name"] == "dashboard")
    assert {"--token-file=/etc/edl/tokens/tokens", "--allow-insecure-tokens"} <= set(page)
    assert not any(argument.startswith("--tls") for argument in page)


def test_each_value_has_a_schema() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())

    def compare(values: dict[str, Any], known: dict[str, Any], path: str) -> None:
        assert known.get("additionalProperties") is False, f"{path} takes anything"
        assert set(values) <= set(known["properties"]), path
        for name, value in values.items():
            below = known["properties"][name]
            if isinstance(value, dict) and "properties" in below:
                compare(value, below, f"{path}.{name}")

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    compare(values, schema, "values")
    assert set(schema["properties"]) - set(values) == {"global"}


def test_manifests_are_up_to_date(helm: str) -> None:
    spec = importlib.util.spec_from_file_location("manifests", ROOT / "tools/manifests.py")
    assert spec is not None
    assert spec.loader is not None
    manifests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(manifests)
    assert (CHART / "files/grafana.json").read_text() == manifests.GRAFANA.read_text(), "make manifests"
    rendered = manifests.render(helm)
    assert {path.name for path in manifests.MANIFESTS.iterdir()} == set(rendered)
    for name, text in rendered.items():
        written = [item for item in yaml.safe_load_all((manifests.MANIFESTS / name).read_text()) if item]
        found = [item for item in yaml.safe_load_all(text) if item]
        assert sorted(written, key=str) == sorted(found, key=str), f"{name}: make manifests"


def test_notes_can_be_pasted() -> None:
    """A shell ends a here-document at a line that is the word and nothing else."""
    lines = (CHART / "templates/NOTES.txt").read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.endswith("<<'JOB'"))
    end = lines.index("JOB")
    text = re.sub(r"\{\{.*?\}\}", "edl", "\n".join(lines[begin + 1 : end]))
    job = parse_elastic_job({**yaml.safe_load(text)}, "kubernetes://edl")
    assert isinstance(job, ElasticJob), job


def test_operator_manifest_is_its_own() -> None:
    """Without dashboard.yaml and capacity.yaml, the account and the rights of neither are there."""
    text = (ROOT / "serving/kube/manifests/operator.yaml").read_text()
    found = [item for item in yaml.safe_load_all(text) if item]
    names = [item["metadata"]["name"] for item in found if item["kind"] in ("ServiceAccount", "Role", "ClusterRole")]
    assert sorted(names) == ["edl-discovery", "edl-member", "edl-operator", "edl-operator"]


def test_versions_agree() -> None:
    import edl

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == edl.__version__
