"""plan_job against a cluster in which anything happens in any order: what holds always, and what it comes to."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from edl.kube.objects import parse_time
from edl.master.kube.jobs import CONDITION_REASONS, EVENT_REASONS
from edl.master.kube.observation import Plan
from tests.fast.master.kube.jobs.simulated_cluster import Reading, SimulatedCluster

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
SUCCESSES = (0, 143, 137)


class FixedRoom:
    """A capacity that says the same of every pod, also what is long untrue."""

    def __init__(self, room: int) -> None:
        self.room = room

    def count_fitting(self, pod: Any, **_: Any) -> int:
        return self.room


@dataclass(frozen=True)
class Incident:
    """Something that happens, which of several, and how long all goes well afterwards."""

    kind: str
    number: int
    rounds: int


class Story:
    def __init__(self, least: int, more: int, master: bool, grace: int) -> None:
        spec = {"gracePeriodSeconds": grace, "master": {"enabled": master}}
        self.cluster = SimulatedCluster(minReplicas=least, maxReplicas=least + more, **spec)
        self.cluster.nodes = {"node1": 3, "node2": 3}
        self.reading: Reading | None = None
        self.ends: dict[str, int] = {}
        self.finished = ""

    def pick(self, names: Sequence[str], number: int) -> str:
        return sorted(names)[number % len(names)] if names else ""

    def operator_is_killed(self, number: int) -> None:
        self.check(self.cluster.reconcile(number % 6))

    def operator_comes_late(self, number: int) -> None:
        """What was read long ago is carried out now, or what is read now much later."""
        if self.reading is not None:
            self.check(self.cluster.carry_out(self.reading, number))
        self.reading = self.cluster.read() if number % 2 else None

    def time_passes(self, number: int) -> None:
        self.cluster.now_s += (15, 70, 400, 2000)[number % 4]

    def worker_ends(self, number: int) -> None:
        if name := self.pick(self.cluster.list_running(), number):
            code = (137, 143, 139, 75, 137)[number // 4 % 5]
            self.cluster.end(name, code, "OOMKilled" if number % 5 == 4 else "Error")

    def master_ends(self, number: int) -> None:
        for name in self.cluster.list_live("master"):
            if self.cluster.pods[name]["status"]["phase"] == "Running":
                self.cluster.end(name, (137, 143, 0, 3)[number % 4])

    def job_ends(self, number: int) -> None:
        if number >= 10 and (name := self.pick(self.cluster.list_running(), number)):
            self.cluster.end(name, (0, 1, 0, 74)[number % 4])

    def pod_is_deleted(self, number: int) -> None:
        if name := self.pick(list(self.cluster.pods), number):
            self.cluster.ask_to_end(name)

    def pod_is_gone(self, number: int) -> None:
        if name := self.pick(list(self.cluster.pods), number):
            self.cluster.remove(name)

    def asked_pod_ends(self, number: int) -> None:
        if name := self.pick(self.cluster.list_ending(), number):
            self.cluster.end(name, SUCCESSES[1 + number % 2] if number < 18 else 0)

    def node_is_lost_or_back(self, number: int) -> None:
        node = f"node{1 + number % 2}"
        if node in self.cluster.dead:
            self.cluster.return_node(node)
        else:
            self.cluster.lose_node(node)

    def user_suspends(self, number: int) -> None:
        """For a while, of which an operator sees all, some or nothing."""
        self.cluster.set_spec(suspend=True)
        self.check(self.cluster.reconcile(number))
        if number % 2:
            self.cluster.set_spec(suspend=False)

    def user_resumes(self, number: int) -> None:
        self.cluster.set_spec(suspend=False)

    def user_scales(self, number: int) -> None:
        scaling = "external" if number % 2 else "auto"
        self.cluster.set_spec(maxReplicas=3 + number % 4, scaling=scaling, replicas=number % 9)

    def store_says(self, number: int) -> None:
        self.cluster.wanted = None if number % 4 == 0 else number % 8
        self.cluster.stale = "away" if number % 8 == 4 else ""

    def arbiter_says(self, number: int) -> None:
        self.cluster.allocation = None if number % 3 == 0 else number % 8

    def capacity_says(self, number: int) -> None:
        self.cluster.capacity = None if number % 3 == 0 else FixedRoom(number % 6)

    def happen(self, incident: Incident) -> None:
        action: Callable[[int], None] = getattr(self, incident.kind)
        action(incident.number)
        self.check_status()
        for _ in range(incident.rounds):
            self.work()

    def work(self) -> None:
        self.check(self.cluster.reconcile())
        self.check_members()
        self.check_status()
        self.cluster.schedule()
        if ending := self.cluster.list_ending():
            self.cluster.end(ending[0], 143)
        self.cluster.now_s += 1

    def check(self, plan: Plan) -> None:
        names = [pod["metadata"]["name"] for pod in plan.create]
        assert len(set(names)) == len(names)
        assert all(len(name) <= 63 and LABEL.fullmatch(name) for name in names)
        assert all(note.reason in EVENT_REASONS for note in plan.events)
        for condition in plan.status["conditions"]:
            assert condition["reason"] in CONDITION_REASONS[condition["type"]], condition
            assert condition["message"]
        if plan.status["phase"] in ("Succeeded", "Failed", "Suspended"):
            assert plan.create == ()
        assert plan.requeue_s is None or plan.requeue_s > 0

    def check_members(self) -> None:
        cluster = self.cluster
        spec, phase = cluster.resource["spec"], cluster.status["phase"]
        workers = cluster.list_live()
        members = [name.rsplit("-", 1)[0] for name in workers + cluster.list_live("master")]
        assert len(set(members)) == len(members), "two live pods of a member"
        assert len(workers) <= spec["maxReplicas"]
        assert cluster.status["replicas"] == len(workers)
        if phase in ("Succeeded", "Failed", "Suspended"):
            assert members == []
        elif cluster.find_condition("Running")["reason"] != "Ending":
            records = cluster.status["members"].values()
            waiting = sum("notBefore" in item and parse_time(item["notBefore"]) > cluster.now_s for item in records)
            assert len(workers) + waiting >= spec["minReplicas"], "the minimum is made at once"

    def check_status(self) -> None:
        status = self.cluster.status
        if self.finished:
            assert status["phase"] == self.finished
        if status.get("phase") in ("Succeeded", "Failed"):
            self.finished = status["phase"]
        for key, record in status.get("members", {}).items():
            end = record.get("lastEnd", {"try": -1})
            assert self.ends.get(key, -1) <= end["try"] <= record["try"]
            assert sum(record.get("failures", {}).values()) <= 2 * (record["try"] + 1)
            self.ends[key] = end["try"]

    def end(self) -> None:
        """Let all trouble pass: the job has what it wants, or is over, and nothing is written any more."""
        cluster = self.cluster
        for node in ("node1", "node2"):
            cluster.return_node(node)
        cluster.nodes = {"node1": 20, "node2": 20}
        cluster.capacity = cluster.allocation = cluster.wanted = None
        cluster.stale = ""
        cluster.set_spec(suspend=False, scaling="auto")
        for _ in range(4):
            cluster.now_s += 400
            cluster.settle()
        phase = cluster.status["phase"]
        if phase == "Running":
            assert len(cluster.list_running()) == cluster.resource["spec"]["maxReplicas"], cluster.status
        else:
            assert phase in ("Succeeded", "Failed")
            assert cluster.list_live() + cluster.list_live("master") == []
        before = cluster.status_writes, cluster.made
        for _ in range(3):
            cluster.now_s += 100
            plan = cluster.reconcile()
            assert (plan.create, plan.delete, plan.events) == ((), (), ())
        assert (cluster.status_writes, cluster.made) == before, "nothing changes, nothing is written"


KINDS = [
    *("operator_is_killed", "operator_comes_late", "time_passes", "worker_ends", "master_ends", "job_ends"),
    *("pod_is_deleted", "pod_is_gone", "asked_pod_ends", "node_is_lost_or_back", "user_suspends", "user_resumes"),
    *("user_scales", "store_says", "arbiter_says", "capacity_says"),
]
INCIDENTS = st.lists(
    st.builds(Incident, st.sampled_from(KINDS), st.integers(0, 19), st.integers(0, 7)), min_size=5, max_size=20
)


@settings(max_examples=30)
@given(st.integers(1, 3), st.integers(0, 3), st.booleans(), st.integers(1, 90), INCIDENTS)
def test_anything_in_any_order(least: int, more: int, master: bool, grace: int, incidents: list[Incident]) -> None:
    story = Story(least, more, master, grace)
    for incident in incidents:
        story.happen(incident)
    story.end()
