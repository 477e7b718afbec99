"""What Helm makes of the chart, without a cluster."""

from __future__ import annotations

import itertools
import re
import runpy
from typing import Any

import kubernetes_validate
import pytest
import yaml

import edl
from edl.master.kube.jobs.launches import GROWTH_CLASS
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
HELM, NEW_HELM = (ROOT / f".tools/helm/helm{version}" for version in (3, 4))
UNKNOWN = ("PodMonitor", "WorkloadPriorityClass")  # not Kubernetes' own
OPERATOR_RIGHTS = {
    "": {"pods": "create delete list watch", "events": "create get list patch"},
    "apps": {
        "deployments": "get",
        "deployments/scale": "get patch",
        "statefulsets": "get",
        "statefulsets/scale": "get patch",
    },
    "edl.io": {
        "elasticjobs": "delete get list watch",
        "elasticjobs/status": "patch",
        "teacherpools": "get list watch",
        "teacherpools/status": "patch",
    },
    "policy": {"poddisruptionbudgets": "create delete patch"},
}
"""As documented in docs/kubernetes-operators.md; each is used by `edl.master.kube.operator`."""
MAKES_GROUPS = {"podgroups": "create delete patch"}
RIGHTS = ("ServiceAccount", "Role", "ClusterRole")
BOUND_VERBS = {"get", "list", "watch", "create", "update", "patch", "delete"}
Objects = list[dict[str, Any]]


@pytest.fixture(scope="module")
def helm() -> str:
    """Helm 3; where another version is in question, it is named."""
    for program in (HELM, NEW_HELM):
        if not program.exists():
            pytest.skip(f"{program} is not there: tools/kubernetes.sh fetches it")
    return str(HELM)


@pytest.fixture(scope="module")
def default(helm: str) -> Objects:
    return render(helm, *IMAGE)


@pytest.fixture(scope="module")
def everything(helm: str) -> Objects:
    return render(helm, *EVERYTHING)


def render(helm: str, *options: str, namespace: str = "edl") -> Objects:
    return [item for item in yaml.safe_load_all(render_chart(namespace, *options, helm=helm)) if item]


def find(objects: Objects, kind: str, name: str = "") -> Objects:
    return [item for item in objects if item["kind"] == kind and name in ("", item["metadata"]["name"])]


def namespaces_of(objects: Objects, kind: str, name: str) -> list[str]:
    return [item["metadata"]["namespace"] for item in find(objects, kind, name)]


def arguments(objects: Objects, name: str = "operator") -> list[str]:
    (deployment,) = find(objects, "Deployment", f"edl-{name}")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return list(container["args"])


@pytest.mark.parametrize("version", ["1.25", "1.31", "1.37"])
def test_newer_apis_take_it(default: Objects, everything: Objects, version: str) -> None:
    for objects in (default, everything):
        assert {"Deployment", "Role", "CustomResourceDefinition"} <= {item["kind"] for item in objects}
        for item in objects:
            if item["kind"] not in UNKNOWN:
                kubernetes_validate.validate(item, version, strict=True)


def test_optional_kinds_need_their_api(default: Objects, everything: Objects) -> None:
    for kind in UNKNOWN:
        assert not find(default, kind)
        assert find(everything, kind)


def test_versions_render_alike(helm: str, everything: Objects) -> None:
    assert sorted(everything, key=str) == sorted(render(str(NEW_HELM), *EVERYTHING), key=str)
    for program in (helm, str(NEW_HELM)):
        assert "0 chart(s) failed" in run_program([program, "lint", "--strict", str(CHART), *IMAGE])


def test_crds_are_kept(helm: str, default: Objects) -> None:
    crds = find(default, "CustomResourceDefinition")
    assert {item["metadata"]["name"] for item in crds} == {"elasticjobs.edl.io", "teacherpools.edl.io"}
    for item in crds:
        name = item["metadata"]["name"]
        assert item["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}, name
        written = yaml.safe_load((CHART / f"files/{name}.yaml").read_text())
        assert {**item, "metadata": written["metadata"]} == written
    crds = find(render(helm, *IMAGE, "--set", "crds.keep=false"), "CustomResourceDefinition")
    assert ["annotations" in item["metadata"] for item in crds] == [False, False]
    assert not find(render(helm, *IMAGE, "--set", "crds.install=false"), "CustomResourceDefinition")


def test_pods_are_restricted(everything: Objects) -> None:
    specs = [item["spec"]["template"]["spec"] for item in find(everything, "Deployment")]
    assert len(specs) == 3
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


def test_roles_are_narrow(default: Objects, everything: Objects) -> None:
    rules = [(item["metadata"]["name"], rule) for item in everything for rule in item.get("rules", ())]
    for name, rule in rules:
        assert set(rule["verbs"]) <= BOUND_VERBS, name
        assert "*" not in rule["resources"] + rule["apiGroups"]
        assert not {"secrets", "serviceaccounts", "roles", "rolebindings", "pods/exec"} & set(rule["resources"])
    bound = [item["roleRef"]["name"] for item in find(everything, "ClusterRoleBinding")]
    assert bound == ["edl-capacity"]
    (capacity,) = (rule for name, rule in rules if name == "edl-capacity")
    assert capacity == {"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list", "watch"]}
    assert not any(item["metadata"]["name"] == "edl-capacity" for item in default)


@pytest.mark.parametrize(
    ("option", "added"),
    [
        ("operator.enabled=false", {}),
        ("schedulers.volcano=true", {"scheduling.volcano.sh": MAKES_GROUPS}),
        ("schedulers.kai=true", {"scheduling.run.ai": MAKES_GROUPS}),
    ],
)
def test_rights_are_these(helm: str, option: str, added: dict[str, dict[str, str]]) -> None:
    """A right that is added or taken back is so on purpose; PodGroups are made where the scheduler is named."""
    (role,) = find(render(helm, *IMAGE, "--set", option), "Role", "edl-operator")
    found: dict[str, dict[str, str]] = {}
    for rule in role["rules"]:
        for group, resource in itertools.product(rule["apiGroups"], rule["resources"]):
            verbs = found.setdefault(group, {}).get(resource, "").split()
            found[group][resource] = " ".join(sorted({*verbs, *rule["verbs"]}))
    assert found == OPERATOR_RIGHTS | added


def test_one_operator(default: Objects) -> None:
    """Never two of one release, and no election: one ends before the next begins, also at an upgrade."""
    (deployment,) = find(default, "Deployment", "edl-operator")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    # Below -10 a cluster autoscaler neither buys nor keeps nodes for teachers, and they preempt nobody.
    (found,) = find(default, "PriorityClass")
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
    both = [render(helm, *EVERYTHING, *apis), render(helm, *IMAGE, *options, *apis, namespace="two")]
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
    (found,) = find(render(helm, *IMAGE, *apis), "WorkloadPriorityClass")
    assert found["apiVersion"] == f"kueue.x-k8s.io/{made}"
    assert found["metadata"]["name"] == GROWTH_CLASS
    assert found["value"] < 0


def test_parts_follow_namespaces(helm: str, everything: Objects) -> None:
    """The operator works in each of `watchNamespaces`, and the page shows each; both with a role there."""
    for name in ("edl-operator", "edl-dashboard"):
        for kind in ("Role", "RoleBinding"):
            assert set(namespaces_of(everything, kind, name)) == {"red", "blue"}, (kind, name)
    for binding in find(everything, "RoleBinding", "edl-operator"):
        assert binding["subjects"][0]["namespace"] == "edl"
    assert {"--namespace=red", "--namespace=blue"} <= set(arguments(everything))
    shown = [item for item in arguments(everything, "dashboard") if item.startswith("--kube")]
    assert shown == ["--kube=red", "--kube=blue"]
    own = arguments(render(helm, *IMAGE, namespace="mine"))
    assert {"--namespace=mine", "--store=edl://edl-store.mine:29400"} <= set(own)


@pytest.mark.parametrize(
    ("value", "argument", "runs"),
    [
        ("store=consul+https://consul:8501", "--store=consul+https://consul:8501", False),
        ("store=etcd://a:2379\\,b:2379", "--store=etcd://a:2379,b:2379", False),
        ("store=edl://host:29400", "--store=edl://host:29400", False),
        ("operator.allowStores={consul://consul:8500,etcd+https://}", "--allow-store=etcd+https://", True),
        ("watchNamespaces={red,blue}", "--store=edl://edl-store.edl:29400", True),
        ("storeServer.port=1,storeServer.clusterIP=10.0.0.7", "--store=edl://10.0.0.7:1", True),
    ],
)
def test_store_runs_unless_one_is_named(helm: str, value: str, argument: str, runs: bool) -> None:
    """Its service outlives the release, as jobs do."""
    objects = render(helm, *IMAGE, "--set", value)
    assert argument in arguments(objects)
    for kind in ("Deployment", "Service"):
        found = find(objects, kind, "edl-store")
        assert len(found) == runs, kind
        assert all(item["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"} for item in found)


def test_store_is_one_pod(helm: str) -> None:
    """With a claim its file outlives the pod; the policy lets in the namespaces that meet there."""
    values = "storeServer.claim=data,storeServer.networkPolicy=true,watchNamespaces={red}"
    objects = render(helm, *IMAGE, "--set", values)
    (deployment,) = find(objects, "Deployment", "edl-store")
    spec = deployment["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "data"}} in spec["template"]["spec"]["volumes"]
    (policy,) = find(objects, "NetworkPolicy", "edl-store")
    (rule,) = policy["spec"]["ingress"]
    names = [item["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for item in rule["from"]]
    assert names == ["red", "edl"]


GUARDED = ",dashboard.tokenSecret=t,dashboard.tlsSecret=s"
OWN_CA = {"ca": {"secret": {"name": "s", "key": "tls.crt"}}, "serverName": "edl-dashboard.edl.svc"}
WITH_TOKEN = {"authorization": {"credentials": {"name": "scrape", "key": "token"}}}


@pytest.mark.parametrize(
    ("page", "monitors"),
    [
        ("", [{}]),
        (GUARDED, []),  # each scrape would be refused
        (f"{GUARDED},podMonitor.tokenSecret=scrape", [{"scheme": "https", "tlsConfig": OWN_CA, **WITH_TOKEN}]),
        (
            ",dashboard.tlsSecret=s,podMonitor.tlsConfig.serverName=page",
            [{"scheme": "https", "tlsConfig": {"serverName": "page"}}],
        ),
    ],
)
def test_page_is_scraped_with_token(helm: str, page: str, monitors: list[dict[str, Any]]) -> None:
    """By one PodMonitor at most, of those whose selector takes the page."""
    api = ("--api-versions", "monitoring.coreos.com/v1/PodMonitor")
    objects = render(helm, *IMAGE, *api, "--set", f"dashboard.enabled=true{page}")
    (deployment,) = find(objects, "Deployment", "edl-dashboard")
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    specs = [item["spec"] for item in find(objects, "PodMonitor")]
    found = [spec["podMetricsEndpoints"][0] for spec in specs if spec["selector"]["matchLabels"].items() <= labels]
    keys = ("scheme", "tlsConfig", "authorization")
    assert [{key: item[key] for key in keys if key in item} for item in found] == monitors


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("image.repository=", "no image of EDL is published"),
        ("image.repositry=x", "repositry"),
        ("operator.port=70000", "operator"),
        ("store=kubernetes://edl", "store"),
        ("operator.allowStores={consul://a@b}", "allowStores"),
        ("watchNamespaces={A_b}", "watchNamespaces"),
        ("capacity.enabled=maybe", "capacity"),
        ("dashboard.enabled=true,dashboard.tokenSecret=t", "dashboard.tlsSecret=SECRET"),
    ],
)
def test_bad_values_are_refused(helm: str, option: str, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        render_chart("edl", *IMAGE, "--set", option, helm=helm)


def test_tokens_behind_a_proxy(helm: str) -> None:
    extra = "dashboard.enabled=true,dashboard.tokenSecret=t,dashboard.extraArgs={--allow-insecure-tokens}"
    page = arguments(render(helm, *IMAGE, "--set", extra), "dashboard")
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
    """And that of the operator has neither the account nor the rights of the page or of `edl-capacity`."""
    tool = runpy.run_path(str(ROOT / "tools/manifests.py"))
    assert (CHART / "files/grafana.json").read_text() == tool["GRAFANA"].read_text(), "make manifests"
    rendered = tool["render"](helm)
    assert {path.name for path in tool["MANIFESTS"].iterdir()} == set(rendered)
    for name, text in rendered.items():
        written = [item for item in yaml.safe_load_all((tool["MANIFESTS"] / name).read_text()) if item]
        found = [item for item in yaml.safe_load_all(text) if item]
        assert sorted(written, key=str) == sorted(found, key=str), f"{name}: make manifests"
    rights = [item for item in yaml.safe_load_all(rendered["operator.yaml"]) if item and item["kind"] in RIGHTS]
    names = sorted(item["metadata"]["name"] for item in rights)
    assert names == ["edl-operator", "edl-operator"]


def test_notes_can_be_pasted() -> None:
    """A shell ends a here-document at a line that is the word and nothing else."""
    lines = (CHART / "templates/NOTES.txt").read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.endswith("<<'JOB'"))
    end = lines.index("JOB")
    text = re.sub(r"\{\{.*?\}\}", "edl", "\n".join(lines[begin + 1 : end]))
    job = parse_elastic_job({**yaml.safe_load(text)}, "edl://edl-store.edl:29400")
    assert isinstance(job, ElasticJob), job


def test_versions_agree() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == edl.__version__
