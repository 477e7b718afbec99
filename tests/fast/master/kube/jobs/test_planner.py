"""plan_job on a simulated cluster: what a job does when this and that happens to it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edl.kube.objects import Object
from edl.master.kube.observation import WorkProgress
from tests.fast.master.kube.jobs.simulated_cluster import SimulatedCluster


def build_running(**spec: Any) -> SimulatedCluster:
    cluster = SimulatedCluster(**spec)
    cluster.settle()
    return cluster


def get_record(cluster: SimulatedCluster, key: str = "worker-0") -> dict[str, Any]:
    return cluster.status["members"][key]


@pytest.mark.parametrize(("store", "expected"), [("edl://store.edl:29400", True), ("consul://10.0.0.9:8500", False)])
def test_pod_as_store_may_be_away(store: str, expected: bool) -> None:
    """Workers go on for 36 s without their store where that is a pod, which may have to start again."""
    plan = SimulatedCluster(minReplicas=1, store=store).reconcile()
    args = plan.create[0]["spec"]["containers"][0]["args"]
    assert ("takeover_timeout=45" in args) == expected


def test_grows_by_single_workers() -> None:
    cluster = SimulatedCluster(minReplicas=1, maxReplicas=8)
    for count in (1, 2, 3, 4, 5):
        cluster.reconcile()
        assert len(cluster.list_live()) == count
        cluster.schedule()
    assert len(cluster.list_running()) == 4, "as many as there is room for"
    cluster.now_s += 21
    plan = cluster.reconcile()
    assert len(plan.delete) == 1
    assert len(cluster.list_live()) == 4
    assert cluster.events[-1] == "NoRoom"
    assert plan.requeue_s >= 20
    condition = cluster.find_condition("Scheduled")
    assert (condition["status"], condition["reason"]) == ("True", "MinimumScheduled")


def test_new_job_lets_one_that_waits_start() -> None:
    cluster = SimulatedCluster(minReplicas=1, maxReplicas=1)
    cluster.reconcile()
    cluster.starts_after = "elasticjobs/ns/big"
    cluster.settle()
    assert cluster.pods == {}, "the scheduler would give it the GPUs that become free"
    condition = cluster.find_condition("Scheduled")
    assert (condition["reason"], "elasticjobs/ns/big" in condition["message"]) == ("WaitingForTurn", True)
    assert cluster.status["message"] == condition["message"]
    cluster.starts_after = ""
    cluster.settle()
    assert len(cluster.list_running()) == 1
    cluster.starts_after = "elasticjobs/ns/big"
    cluster.settle()
    assert len(cluster.list_running()) == 1, "what runs goes on"


def test_many_workers_come_by_the_hundred() -> None:
    """A look stays short, and is followed by the next at once."""
    cluster = SimulatedCluster(minReplicas=250, maxReplicas=250)
    plans = [cluster.reconcile() for _ in range(4)]
    assert [len(plan.create) for plan in plans] == [100, 100, 50, 0]
    assert plans[0].requeue_s <= 1
    assert len(cluster.list_live()) == 250


def test_half_a_minimum_does_not_run() -> None:
    cluster = SimulatedCluster(minReplicas=2, maxReplicas=2)
    cluster.nodes = {"node1": 1}
    cluster.settle()
    assert (cluster.status["phase"], cluster.status["readyReplicas"]) == ("Pending", 1)
    assert cluster.find_condition("Running")["status"] == "False"
    cluster.nodes["node2"] = 1
    cluster.settle()
    assert (cluster.status["phase"], cluster.find_condition("Running")["status"]) == ("Running", "True")


def test_given_room_that_does_not_come() -> None:
    """A worker that waits for ever would keep all that is idle from others, since what waits comes first."""
    cluster = SimulatedCluster(minReplicas=1, maxReplicas=8)
    cluster.allocation = 6
    cluster.reconcile()
    cluster.schedule()
    cluster.reconcile()
    assert len(cluster.list_live()) == 6
    cluster.schedule()
    cluster.now_s += 30
    assert not cluster.reconcile().delete, "whoever has the room is leaving it"
    cluster.now_s += 60
    assert len(cluster.reconcile().delete) == 2
    assert len(cluster.list_live()) == 4
    assert "NoRoom" in cluster.events


def test_thirty_come_back_in_one_round() -> None:
    cluster = SimulatedCluster(minReplicas=2, maxReplicas=30)
    cluster.nodes["node1"] = 40
    cluster.settle(80)
    assert len(cluster.list_running()) == 30
    for name in cluster.list_running():
        cluster.ask_to_end(name)
    plan = cluster.reconcile()
    assert len(plan.create) == 30
    assert [note.reason for note in plan.events] == ["WorkerEnded"]
    assert "30 workers" in plan.events[0].message


def test_bug_in_the_script_stops_the_job() -> None:
    cluster = build_running(minReplicas=2, maxReplicas=2)
    words = "Traceback:\n" + "  File x\n" * 400 + "ValueError: no data"
    cluster.end("job-worker-1-0", 1, message=json.dumps({"cause": "error", "exit_code": 1, "message": words}))
    plan = cluster.reconcile()
    assert cluster.status["phase"] == "Failed"
    condition = cluster.find_condition("Failed")
    assert (condition["status"], condition["reason"]) == ("True", "UserError")
    assert "ValueError: no data" in condition["message"]
    assert len(condition["message"]) > 3000, "the condition has all of it"
    assert cluster.status["message"] == "worker-1: ValueError: no data"
    assert [note.reason for note in plan.events] == ["WorkerEnded", "Failed"]
    assert plan.events[1].message.endswith("ValueError: no data")
    assert len(plan.events[1].message) <= 900
    assert [deletion.name for deletion in plan.delete] == ["job-worker-0-0"], "the failed pod stays for its logs"
    cluster.settle()
    assert list(cluster.pods) == ["job-worker-1-0"]
    assert cluster.reconcile().create == ()


def test_typo_in_command_ends_the_job() -> None:
    """containerd says of a container that never started that it did in 1970: 56 years are no steady run."""
    cluster = SimulatedCluster(minReplicas=1)
    for _ in range(200):
        cluster.reconcile()
        for name in cluster.list_live():
            cluster.pods[name]["spec"]["nodeName"] = "node1"
            cluster.end(name, 128, "StartError", 'exec: "pyhton": not found', started="1970-01-01T00:00:00Z")
        cluster.now_s += 1
    assert (cluster.status["phase"], cluster.made) == ("Failed", 4)
    failed = cluster.find_condition("Failed")
    assert failed["reason"] == "LaunchFailed"
    assert "pyhton" in failed["message"]


def test_cause_is_named_while_it_waits() -> None:
    cluster = build_running()
    for number in range(2):
        cluster.schedule()
        cluster.end(f"job-worker-0-{number}", 128, "StartError", "no such file")
        cluster.reconcile()
    assert cluster.find_condition("Running")["reason"] == "BackingOff"
    assert "StartError): no such file" in cluster.status["message"]


def test_job_waits_for_a_teacher() -> None:
    cluster = build_running(minReplicas=1, maxReplicas=1)
    message = {"cause": "no_teacher", "exit_code": 75, "message": "Traceback\nno live teacher for 'digits'"}
    for _ in range(30):
        cluster.now_s += 301
        cluster.reconcile()
        cluster.schedule()
        (name,) = cluster.list_live()
        cluster.end(name, 75, message=json.dumps(message))
        cluster.reconcile()
    assert cluster.status["phase"] == "Pending"
    for text in (cluster.status["message"], cluster.find_condition("Running")["message"]):
        assert "no teacher (" in text
        assert text.endswith(": no live teacher for 'digits'")


def test_status_by_hand_ends_no_job() -> None:
    cluster = build_running(minReplicas=2, maxReplicas=2)
    pods, status = set(cluster.pods), dict(cluster.status)
    ended = [{"type": kind, "status": "True", "reason": "x"} for kind in ("Complete", "Failed")]
    for conditions in ([], ended):
        cluster.resource["status"] = {"phase": "Succeeded", "conditions": conditions, "members": status["members"]}
        cluster.settle()
        assert (cluster.status["phase"], set(cluster.pods)) == ("Running", pods)
        assert cluster.find_condition("Complete")["status"] == "False"
    for name in pods:
        cluster.end(name, 0)
    cluster.settle()
    cluster.status["phase"] = "Running"
    cluster.settle()
    assert (cluster.status["phase"], cluster.status["wantedReplicas"]) == ("Succeeded", 0)


def test_success_waits_for_the_others() -> None:
    cluster = build_running(minReplicas=2, maxReplicas=3)
    cluster.progress = WorkProgress(percentage=99)
    cluster.end("job-worker-0-0", 0)
    plan = cluster.reconcile()
    assert (plan.create, plan.delete) == ((), ())
    assert cluster.status["phase"] == "Running"
    assert cluster.find_condition("Running")["reason"] == "Ending"
    cluster.end("job-worker-1-0", 0)
    cluster.end("job-worker-2-0", 143)
    plan = cluster.reconcile()
    assert cluster.status["phase"] == "Succeeded"
    assert cluster.status["progressPercentage"] == 100
    assert plan.events[-1].reason == "Succeeded"
    assert plan.create == ()


@pytest.mark.parametrize(("code", "phase"), [(0, "Succeeded"), (74, "Failed")])
def test_preempted_worker_did_the_last_step(code: int, phase: str) -> None:
    """Also where its last state is not stored: a successor would find the job done, and nothing in its memory."""
    cluster = build_running()
    cluster.ask_to_end("job-worker-0-0")
    pod = cluster.pods["job-worker-0-0"]
    cluster.reconcile()
    assert "job-worker-0-1" in cluster.pods
    cluster.end("job-worker-0-0", code)
    cluster.pods["job-worker-0-0"] = pod  # the kubelet has written its end, and not yet removed it
    cluster.reconcile()
    assert cluster.status["phase"] == phase
    assert cluster.list_live() == []


@pytest.mark.parametrize("codes", [(0, 74), (74, 0)])
def test_one_of_two_is_not_stored(codes: tuple[int, int]) -> None:
    """The second ends while the job is ending: it stores its own last state meanwhile."""
    cluster = build_running(minReplicas=2, maxReplicas=2)
    cluster.end("job-worker-0-0", codes[0])
    plan = cluster.reconcile()
    assert (plan.create, plan.delete) == ((), ())
    assert cluster.find_condition("Running")["reason"] == "Ending"
    cluster.end("job-worker-1-0", codes[1])
    cluster.reconcile()
    assert cluster.status["phase"] == "Failed"
    assert cluster.find_condition("Failed")["reason"] == "NotStored"


def test_suspend_and_resume() -> None:
    cluster = build_running(minReplicas=2, maxReplicas=2)
    cluster.end("job-worker-0-0", 137, "OOMKilled")
    cluster.settle()
    cluster.set_spec(suspend=True)
    plan = cluster.reconcile()
    assert {deletion.grace_period_s for deletion in plan.delete} == {None}, "the pod's own grace period"
    assert cluster.events[-1] == "Suspended"
    cluster.settle()
    assert cluster.pods == {}
    assert (cluster.status["phase"], cluster.status["replicas"]) == ("Suspended", 0)
    assert "startTime" not in cluster.status
    assert get_record(cluster)["memoryFactor"] == 1.5
    cluster.set_spec(suspend=False)
    assert len(cluster.reconcile().create) == 2, "at once"
    assert cluster.events[-1] == "Resumed"
    assert set(cluster.pods) == {"job-worker-0-2", "job-worker-1-1"}, "no name is used twice"
    assert get_record(cluster)["failures"] == {"out_of_memory": 1}


def test_shrinks_by_the_newest() -> None:
    cluster = build_running(minReplicas=1, maxReplicas=4)
    assert len(cluster.list_running()) == 4
    cluster.wanted = 2
    plan = cluster.reconcile()
    assert [deletion.name for deletion in plan.delete] == ["job-worker-2-0", "job-worker-3-0"]
    assert plan.events[0].reason == "Shrinking"
    assert cluster.status["wantedReplicas"] == 2
    cluster.settle()
    assert len(cluster.list_live()) == 2


@pytest.mark.parametrize("suspended", [False, True])
def test_place_is_lost_when_fewer_are_wanted(suspended: bool) -> None:
    """Workers that were killed while the job shrank: when it grows again, what they had may be another's."""
    cluster = build_running(minReplicas=1, maxReplicas=4, scaling="external", replicas=4)
    for name in ("job-worker-2-0", "job-worker-3-0"):
        cluster.end(name, 137, "OOMKilled")
    cluster.set_spec(replicas=2, suspend=suspended)
    cluster.settle()
    assert cluster.list_running() == ([] if suspended else ["job-worker-0-0", "job-worker-1-0"])
    cluster.nodes = {"node1": 1, "node2": 1}
    cluster.now_s += 600
    cluster.set_spec(replicas=4, suspend=False)
    assert len(cluster.reconcile().create) <= 1, "the others wait until the first has a node"


def test_external_scaling() -> None:
    cluster = build_running(minReplicas=1, maxReplicas=4, scaling="external", replicas=3)
    assert len(cluster.list_running()) == 3
    cluster.wanted = 1
    cluster.reconcile()
    assert len(cluster.list_running()) == 3, "only /scale moves it"
    cluster.set_spec(replicas=99)
    cluster.settle()
    assert cluster.status["wantedReplicas"] == 4
    cluster.set_spec(scaling="auto", replicas=2)
    cluster.wanted = None
    cluster.settle()
    assert cluster.events.count("ScaleIgnored") == 1
    assert len(cluster.list_running()) == 4


def test_store_away_changes_nothing() -> None:
    """A job that stays at its minimum for ever, Valid and without a word, is a riddle."""
    cluster = SimulatedCluster(minReplicas=1, maxReplicas=4)
    cluster.stale = cluster.unreachable = "edl://edl-store.edl:29400: cannot be reached"
    cluster.settle()
    accepted = cluster.find_condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("True", "StoreUnreachable")
    assert accepted["message"] == cluster.unreachable
    assert cluster.status["message"].endswith(f" workers run; {cluster.unreachable}")
    assert (cluster.events.count("StoreUnreachable"), len(cluster.list_running())) == (1, 1)
    cluster.stale, cluster.unreachable, cluster.wanted = "", "", 3
    cluster.settle()
    assert cluster.find_condition("Accepted")["reason"] == "Valid"
    cluster.stale, cluster.wanted = "away again", None
    cluster.settle()
    assert len(cluster.list_running()) == 3
    cluster.stale = ""
    cluster.refused = "consul://x: the operator reads it once it is allowed"
    cluster.settle()
    assert len(cluster.list_running()) == 4, "nothing will ever say what is useful"
    accepted = cluster.find_condition("Accepted")
    assert (accepted["status"], accepted["reason"], accepted["message"]) == ("True", "StoreNotAllowed", cluster.refused)
    assert cluster.events.count("StoreNotAllowed") == 1


def test_deadline() -> None:
    cluster = SimulatedCluster(activeDeadlineSeconds=100)
    cluster.reconcile()
    cluster.schedule()
    cluster.now_s += 1
    assert cluster.reconcile().requeue_s == pytest.approx(100, abs=10)
    cluster.now_s += 101
    cluster.reconcile()
    assert cluster.find_condition("Failed")["reason"] == "DeadlineExceeded"
    assert cluster.list_live() == []


def test_master_is_replaced_at_once() -> None:
    cluster = build_running(master={"enabled": True, "args": ["--data", "range:10"]})
    args = cluster.pods["job-master-0-0"]["spec"]["containers"][0]["args"]
    assert args[:2] == ["master", "job-01234567"]
    assert args[-2:] == ["--data", "range:10"]
    assert args[args.index("--journal") + 1] == "store:", "its successor reads what it has written"
    cluster.end("job-master-0-0", 137)
    cluster.reconcile()
    assert cluster.list_live("master") == ["job-master-0-1"]
    assert cluster.status["replicas"] == 1, "a master is no worker"


def test_progress_is_shown_and_kept() -> None:
    cluster = build_running()
    cluster.progress = WorkProgress(percentage=10, remaining_s=1000)
    cluster.reconcile()
    writes = cluster.status_writes
    cluster.progress = WorkProgress(percentage=10, remaining_s=950)
    cluster.reconcile()
    assert cluster.status_writes == writes, "an estimate that is nearly the same is not worth a write"
    cluster.progress = None
    cluster.reconcile()
    assert cluster.status["progressPercentage"] == 10
    assert cluster.status["estimatedRemainingSeconds"] == 1000


def test_disruption_budget() -> None:
    plan = SimulatedCluster(minReplicas=3, maxReplicas=4).reconcile()
    ((kind, budget),) = plan.apply
    assert kind.plural == "poddisruptionbudgets"
    assert budget["spec"]["minAvailable"] == 3
    assert budget["spec"]["selector"]["matchLabels"]["edl.io/role"] == "worker"
    assert "apiVersion" not in budget, "the client knows the server's"


def list_options(cluster: SimulatedCluster, option: str) -> set[str]:
    lines = [pod["spec"]["containers"][0]["args"] for pod in cluster.pods.values()]
    return {line[line.index(option) + 1] for line in lines}


def test_store_is_kept_while_pods_run() -> None:
    """A successor that met in another store would train the same job again, into the same checkpoint."""
    cluster = SimulatedCluster(minReplicas=2, checkpoint="/c")
    cluster.settle()
    cluster.set_spec(store="consul://new:8500", checkpoint="/d")
    cluster.end("job-worker-1-0", 137, "Error")
    cluster.settle()
    assert "job-worker-1-1" in cluster.list_running()
    assert list_options(cluster, "--store") == {"consul://c:8500"}
    assert list_options(cluster, "--checkpoint") == {"/c"}
    accepted = cluster.find_condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("True", "StoreChangeIgnored")
    assert "consul://new:8500" in accepted["message"]
    assert cluster.events.count("StoreChangeIgnored") == 1
    cluster.set_spec(store="http://new")
    cluster.settle()
    message = cluster.find_condition("Accepted")["message"]
    assert "unknown scheme 'http'" in message
    assert "suspend" not in message, "it could not start again with that store"
    cluster.set_spec(store="")  # the operator was started again without `--store`
    cluster.end("job-worker-0-0", 137, "Error")
    cluster.settle()
    assert "job-worker-0-1" in cluster.list_running()
    cluster.set_spec(store="consul://new:8500", suspend=True)
    cluster.reconcile()
    assert cluster.pods
    cluster.set_spec(suspend=False)
    cluster.reconcile()
    assert list_options(cluster, "--store") == {"consul://c:8500"}, "pods of the old store are still about"


@pytest.mark.parametrize("ahead_s", [0, -3600, 3600])
def test_nodes_clock_is_another(ahead_s: float) -> None:
    """The others have a minute to store their last states, by the operator's clock."""
    cluster = build_running(minReplicas=2, maxReplicas=2)
    cluster.now_s += ahead_s
    cluster.end("job-worker-0-0", 0)
    cluster.now_s -= ahead_s
    assert cluster.reconcile().requeue_s == pytest.approx(60, abs=1)
    assert cluster.list_live() == ["job-worker-1-0"]
    cluster.now_s += 61
    cluster.reconcile()
    assert cluster.list_live() == []
    assert cluster.status["phase"] == "Succeeded"


@pytest.mark.parametrize("code", [0, 1])
def test_sidecar_holds_nothing_in_the_end(code: int) -> None:
    """The main container has ended, another runs on: the pod keeps its GPU until it is deleted."""
    cluster = build_running()
    cluster.end("job-worker-0-0", code)
    cluster.pods["job-worker-0-0"]["status"]["phase"] = "Running"
    cluster.reconcile()
    assert cluster.status["phase"] == ("Failed" if code else "Succeeded")
    assert cluster.list_ending() == ["job-worker-0-0"]
    del cluster.pods["job-worker-0-0"]["metadata"]["deletionTimestamp"]  # that operator was killed before it asked
    cluster.reconcile()
    assert cluster.list_ending() == ["job-worker-0-0"]


def build_cluster(scheduler: str = "", **spec: Any) -> SimulatedCluster:
    cluster = SimulatedCluster(minReplicas=2, maxReplicas=4, **spec)
    if scheduler:
        cluster.resource["spec"]["template"]["spec"]["schedulerName"] = scheduler
    return cluster


def create(cluster: SimulatedCluster) -> list[Object]:
    cluster.settle()
    return [cluster.pods[name] for name in sorted(cluster.pods)]


def test_kueue() -> None:
    cluster = build_cluster(queue="team-a")
    pods = create(cluster)
    assert len(pods) == 4
    for index, pod in enumerate(pods):
        labels, annotations = pod["metadata"]["labels"], pod["metadata"]["annotations"]
        assert labels["kueue.x-k8s.io/queue-name"] == "team-a"
        if index < 2:
            assert labels["kueue.x-k8s.io/pod-group-name"] == "job-01234567"
            assert annotations["kueue.x-k8s.io/pod-group-total-count"] == "2"
            assert "kueue.x-k8s.io/priority-class" not in labels
        else:
            assert "kueue.x-k8s.io/pod-group-name" not in labels
            assert labels["kueue.x-k8s.io/priority-class"] == "edl-growth"


@pytest.mark.parametrize(
    ("scheduler", "api_version", "annotation"),
    [
        ("volcano", "scheduling.volcano.sh/v1beta1", "scheduling.k8s.io/group-name"),
        ("kai-scheduler", "scheduling.run.ai/v2alpha2", "pod-group-name"),
    ],
)
def test_pod_groups(scheduler: str, api_version: str, annotation: str) -> None:
    cluster = build_cluster(scheduler, queue="q", priorityClassName="high")
    _, (kind, group) = cluster.reconcile().apply
    assert (kind.plural, group["apiVersion"]) == ("podgroups", api_version)
    assert set(group) == {"apiVersion", "kind", "metadata", "spec"}
    assert group["spec"] == {"minMember": 2, "queue": "q", "priorityClassName": "high"}
    assert group["metadata"]["ownerReferences"][0]["uid"] == "0123456789ab"
    for pod in create(cluster):
        assert pod["metadata"]["annotations"][annotation] == group["metadata"]["name"]
        assert not any(label.startswith("kueue") for label in pod["metadata"]["labels"])
    _, (_, plain) = build_cluster(scheduler).reconcile().apply
    assert plain["spec"] == {"minMember": 2}


def test_pending_growth_is_left_to_the_queue() -> None:
    cluster = build_cluster(queue="team-a")
    cluster.nodes = {"node1": 2}
    cluster.settle()
    assert len(cluster.list_live()) == 3
    made = cluster.made
    cluster.now_s += 1000
    cluster.settle()
    assert cluster.made == made, "a queue admits what it holds: it is not taken away from it"


def test_group_goes_with_the_job() -> None:
    cluster = build_cluster("volcano")
    cluster.settle()
    for number in range(4):
        cluster.end(f"job-worker-{number}-0", 0)
    plan = cluster.reconcile()
    assert {kind.plural for kind, _ in plan.remove} == {"podgroups", "poddisruptionbudgets"}


def test_gang_keeps_its_group() -> None:
    """The pods of the group are the last to go, however long the others run."""
    cluster = build_cluster(queue="team-a")
    cluster.settle()
    cluster.end("job-worker-0-0", 137)
    cluster.settle()
    cluster.wanted = 2
    cluster.settle()
    assert sorted(cluster.pods) == ["job-worker-0-1", "job-worker-1-0"]
