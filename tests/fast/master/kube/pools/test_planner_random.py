"""Any sequence of events: a pool keeps its promises at every step, and comes to rest where it should."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fast.master.kube.pools.simulated_cluster import SimulatedCluster

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("reconcile"), st.integers(0, 4)),
        st.tuples(st.just("wanted"), st.one_of(st.none(), st.integers(0, 6))),
        st.tuples(st.just("online"), st.integers(0, 3)),
        st.tuples(st.just("leave"), st.integers(0, 3)),
        st.tuples(st.just("schedule"), st.just(0)),
        st.tuples(st.just("kubelets"), st.just(0)),
        st.tuples(st.just("time"), st.sampled_from([1, 5, 30, 400])),
        st.tuples(st.just("suspend"), st.booleans()),
        st.tuples(st.just("kill"), st.integers(0, 5)),
        st.tuples(st.just("fail"), st.integers(0, 5)),
        st.tuples(st.just("edit"), st.integers(0, 2)),
    ),
    max_size=25,
)
POOLS = st.fixed_dictionaries({"minReplicas": st.integers(0, 2), "maxReplicas": st.integers(2, 5)})


def do(made: SimulatedCluster, step: str, value: Any) -> None:
    online = f"online-{value}"
    teachers = sorted(pod["metadata"]["name"] for pod in made.teachers())
    if step == "reconcile":
        made.reconcile(calls=value)
    elif step == "wanted":
        made.wanted = value
    elif step == "online" and online not in made.pods:
        made.add_online(online)
    elif step == "leave" and online in made.pods:
        made.delete(online)
    elif step == "schedule":
        made.schedule()
    elif step == "kubelets":
        made.run_kubelets()
    elif step == "time":
        made.now_s += value
    elif step == "suspend":
        made.resource["spec"]["suspend"] = value
    elif step == "kill" and value < len(teachers):
        made.delete(teachers[value])
    elif step == "edit":
        made.edit(serve=[f"m.py:load{value}"])
    elif step == "fail" and value < len(teachers):
        made.pods[teachers[value]]["status"] = {"phase": "Failed", "reason": "Evicted"}


@settings(max_examples=25)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=3), st.booleans(), POOLS, STEPS)
def test_promises_hold_at_every_step(
    gpus: list[int], capacity: bool, spec: dict[str, Any], steps: list[tuple[str, Any]]
) -> None:
    """The operator is killed anywhere, pods are taken, deleted, evicted; time passes or does not."""
    made = SimulatedCluster(gpus, capacity, **spec)
    made.wanted = 3
    for step, value in steps:
        do(made, step, value)
        assert made.pending() <= 1, f"after {step}: {made.pending()} teachers wait for a node"
        surge = any(step == "edit" for step, _ in steps)  # a successor comes before the teacher that it replaces goes
        assert len(made.teachers()) <= spec["maxReplicas"] + surge, f"after {step}"
    made.resource["spec"]["suspend"] = False
    made.wanted = 3
    made.now_s += 2000  # back-off and nodes that were left out are over
    made.settle(50, step_s=30)
    target = max(spec["minReplicas"], min(3, spec["maxReplicas"]))
    idle = sum(gpus) - sum(name.startswith("online") and "nodeName" in pod["spec"] for name, pod in made.pods.items())
    assert made.placed() == min(target, idle)
    assert all("deletionTimestamp" not in pod["metadata"] for pod in made.pods.values())
    assert made.resource["status"]["readyReplicas"] == made.placed()
    assert set(made.list_serves()) <= {made.resource["spec"]["serve"][0]}


@settings(max_examples=15)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_two_operators_do_no_harm(calls: list[int]) -> None:
    """Both plan on the same observation; the second carries out an old plan."""
    made = SimulatedCluster([2, 2], True)
    made.wanted = 4
    for number, count in enumerate(calls):
        if number == 4:
            made.edit(serve=["n.py:load"])
        old = made.plan()
        made.reconcile(calls=count)
        made.schedule()
        for pod in old.create:  # the other's create: the name is there, or is not
            if pod["metadata"]["name"] not in made.pods:
                made.add(pod, -100)
        assert len(made.teachers()) <= 4 + (number >= 4)
        made.run_kubelets()
        made.now_s += 1
    made.settle(60)
    assert made.placed() == 4
    assert made.list_serves() == made.resource["spec"]["serve"]
