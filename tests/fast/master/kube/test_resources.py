"""ElasticJob and TeacherPool: what is read of them, and why they are refused."""

from __future__ import annotations

import copy
import dataclasses
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.master.kube.resources import ElasticJob, TeacherPool, parse_elastic_job, parse_teacher_pool

CRDS = Path(__file__).parents[4] / "serving" / "kube" / "chart" / "files"
METADATA = {
    "name": "digits",
    "namespace": "lab",
    "uid": "0123456789abcdef",
    "resourceVersion": "7",
    "generation": 3,
    "creationTimestamp": "2026-01-31T12:00:00Z",
}
TEMPLATE = {"spec": {"containers": [{"name": "main", "image": "student:1"}]}}


def make(**spec: Any) -> dict[str, Any]:
    return {"metadata": dict(METADATA), "spec": {"store": "consul://c", "template": TEMPLATE, **spec}}


make_job, make_pool = partial(make, run=["train.py"]), partial(make, serve=["m.py:f"])


def reasons(found: object) -> list[str]:
    assert isinstance(found, tuple), f"accepted: {found}"
    return [problem.reason for problem in found]


def test_store_of_the_operator() -> None:
    resource = make_job()
    del resource["spec"]["store"]
    assert reasons(parse_elastic_job(resource)) == ["NoStore"]
    assert parse_elastic_job(resource, "etcd://e").store == "etcd://e"  # type: ignore[union-attr]
    resource["spec"]["store"] = "sqlite:///tmp/a"
    assert isinstance(parse_elastic_job(resource, "sqlite:////tmp/a"), ElasticJob), "a test on one machine"


@pytest.mark.parametrize(
    ("store", "reason", "words"),
    [
        ("sqlite:///tmp/a", "StoreNotShared", "each pod would have its own"),
        ("sqlite:/tmp/a", "StoreNotShared", "edl://edl-store.edl:29400"),
        ("SQLite:///tmp/a", "StoreNotShared", "omit it to use the operator's own store"),
        ("http://consul:8500", "InvalidField", "unknown scheme 'http'"),
        ("ed1://a:1", "InvalidField", "unknown scheme 'ed1'"),
        ("edl-store.edl:29400", "InvalidField", "unknown scheme"),
        ("edl:/x", "InvalidField", "a host is missing"),
        ("edl://:1", "InvalidField", "no host"),
        ("etcd://a:2379,:1", "InvalidField", "no host"),
        ("edl://a:port", "InvalidField", "port"),
        ("kubernetes://x", "InvalidField", "no longer supported"),
        ("store", "InvalidField", "scheme is missing"),
    ],
)
def test_store_that_pods_cannot_share(store: str, reason: str, words: str) -> None:
    for parse, resource in ((parse_elastic_job, make_job(store=store)), (parse_teacher_pool, make_pool(store=store))):
        found = parse(resource, "sqlite:///tmp/other")
        assert reasons(found) == [reason]
        assert words in found[0].message  # type: ignore[index]


def test_store_in_a_message_has_no_token() -> None:
    (problem,) = parse_elastic_job(make_job(store="http://user:geheim@c:1/?token=geheim"))  # type: ignore[misc]
    assert "geheim" not in problem.message
    assert "http://c:1/" in problem.message


@pytest.mark.parametrize(
    ("spec", "reason", "words"),
    [
        ({"minReplicas": 5, "maxReplicas": 2}, "MinAboveMax", "spec.minReplicas is 5"),
        ({"minReplicas": 0}, "InvalidField", "1 worker or more"),
        ({"maxReplicas": 1_000_000}, "InvalidField", "1 to 1000"),
        ({"maxReplicas": 2.5}, "InvalidField", "2.5"),
        ({"run": []}, "EmptyRun", "edl run"),
        ({"run": ["train.py", 0.1]}, "InvalidField", "quotes"),
        ({"scaling": "manual"}, "InvalidField", "auto or external"),
        ({"template": None}, "NoTemplate", "pod template"),
        ({"template": {"spec": {}}}, "NoContainer", "containers"),
        ({"template": {"spec": {"containers": [7]}}}, "InvalidField", "containers[0]"),
        ({"template": {"spec": {"containers": [{"name": "a"}]}}}, "InvalidContainer", "image"),
        ({"template": {"spec": {"containers": [{"name": "a", "image": "i"}] * 2}}}, "InvalidContainer", "unique name"),
        (
            {"template": {"spec": {"containers": [{"name": "a", "image": "i", "args": ["x"]}]}}},
            "ArgsInTemplate",
            "spec.run",
        ),
        ({"master": {"enabled": 1}}, "InvalidField", "spec.master.enabled"),
    ],
)
def test_refused_job(spec: dict[str, Any], reason: str, words: str) -> None:
    found = parse_elastic_job(make_job(**spec))
    assert reason in reasons(found)
    assert words in "\n".join(problem.message for problem in found)  # type: ignore[union-attr]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40)
@given(st.data())
def test_garbage_is_refused_with_reasons(data: st.DataObject) -> None:
    for parse, build in ((parse_elastic_job, make_job), (parse_teacher_pool, make_pool)):
        resource = copy.deepcopy(build(scaleTargetRef=None, master={}, minReplicas=1, maxReplicas=2))
        place = data.draw(st.sampled_from(["metadata", "spec", "status", *resource["spec"]]))
        (resource["spec"] if place in resource["spec"] else resource)[place] = data.draw(JSON)
        found = parse(resource)
        for problem in found if isinstance(found, tuple) else ():
            assert re.fullmatch("[A-Z][A-Za-z]+", problem.reason)
            assert problem.message


def _field_names(kind: type) -> dict[str, Any]:
    read_only = {"name", "namespace", "uid", "generation", "created_s"}
    read_only |= {"deleting", "status", "ignored_edits"}
    names = {}
    for field in dataclasses.fields(kind):
        if field.name not in read_only:
            words = re.sub("_s$", "_seconds", field.name).split("_")
            names[words[0] + "".join(word.capitalize() for word in words[1:])] = field
    return names


@pytest.mark.parametrize(
    ("plural", "kind", "parse"),
    [("elasticjobs", ElasticJob, parse_elastic_job), ("teacherpools", TeacherPool, parse_teacher_pool)],
)
def test_schema_is_the_dataclass(plural: str, kind: type, parse: Any) -> None:
    crd = yaml.safe_load((CRDS / f"{plural}.edl.io.yaml").read_text())
    (version,) = crd["spec"]["versions"]
    assert version["subresources"].keys() == {"status", "scale"}
    schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    assert schema.keys() == _field_names(kind).keys()
    given = (make_job if kind is ElasticJob else make_pool)()
    defaulted = copy.deepcopy(given)
    for name, field in schema.items():
        if "default" in field:
            defaulted["spec"].setdefault(name, field["default"])
    assert parse(defaulted) == parse(given), "a default of the schema is not that of the dataclass"
