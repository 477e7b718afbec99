"""The commands of people, with an operator, on the real cluster."""

from __future__ import annotations

import signal

from tests.kubernetes.conftest import Person
from tests.kubernetes.scenarios.scene import Scene

PATIENT = ("--timeout", "280")
"""Of `edl delete --wait`: a kubelet that is busy lets each pod go with its next garbage collection, once a minute."""

SUBMIT = ("submit", "--template", "pod.json", "--run=--no-prewarm")
"""Workers that do not import PyTorch ahead, since their scripts need none of it."""

STEPS = """\
import os, time
for step in range(int(os.environ["STEPS"])):
    print(f"step {step} of rank {os.environ['RANK']}", flush=True)
    time.sleep(0.2)
"""
FAULTY = """\
def load(path):
    raise ValueError(f"no column 'label' in {path}")
load("part-0007.parquet")
"""


def test_life_of_a_job(scene: Scene, person: Person, edl_store: str) -> None:
    cluster, namespace = scene.cluster, scene.namespace
    scene.operator("--store", edl_store)
    (person.folder / "steps.py").write_text(STEPS)
    said = person.run(*SUBMIT, "--name", "story", "--workers", "1:3", "--env", "STEPS=100000", "steps.py")
    assert "job/story created" in said
    assert "2 workers wanted" in person.run("scale", "story", "2")
    assert "no other file" in said
    assert "already exists in namespace" in person.run(
        *SUBMIT, "--name", "story", "--script-in-image", "steps.py", code=1
    )

    def is_settled() -> bool:
        """Whether the two that are wanted are there and run: two may have been ready before it was scaled."""
        pods = [pod for pod in cluster.list_pods(namespace) if "deletionTimestamp" not in pod["metadata"]]
        return (count_ready(scene), len(pods), len(scene.running("story"))) == (2, 2, 2)

    scene.wait("two workers", is_settled)
    found = person.jobs()["story"]
    assert (found["ready"], found["wanted"]) == (2, 2)
    # Which two of the three that were made first: those that ran when it was scaled.
    stays, ends = (name.removeprefix("story-").rpartition("-")[0] for name in sorted(scene.running("story")))

    logs, path = person.start("logs", "story", "-f")
    scene.wait("both logs", lambda: {stays, ends} <= prefixes(path.read_text()))
    pod = next(name for name in scene.running("story") if name.startswith(f"story-{ends}-"))
    cluster.kubectl("-n", namespace, "delete", "pod", pod, "--grace-period=0", "--force")
    scene.wait("its successor's log", lambda: f"{ends}: continues in pod story-{ends}-" in path.read_text())
    scene.wait("the job's recovery", lambda: count_ready(scene) == 2)
    steps = [line for line in path.read_text().splitlines() if line.startswith(f"{stays} ") and "step " in line]
    assert len(steps) == len(set(steps)) or "step 0 of" in "".join(steps[1:]), "no line comes twice but after a restart"

    status = person.run("status", "story")
    for words in ("job story in namespace", "Running", ends, "Accepted", "edl logs job/story"):
        assert words in status, status
    assert "--max 5" in person.run("scale", "story", "5", code=2)
    assert "3 workers wanted" in person.run("scale", "job/story", "3")
    scene.wait("three workers", lambda: count_ready(scene) == 3)
    one = ("logs", "job/story", "--worker", "2", "--tail", "3")
    scene.wait("a step of the third", lambda: person.run(*one).startswith("step "))
    person.run("suspend", "story")
    scene.wait("no pods", lambda: not cluster.list_pods(namespace))
    assert person.jobs()["story"]["phase"] == "Suspended"
    person.run("resume", "story")
    scene.wait("workers again", lambda: scene.running("story"))
    assert "job/story: deleted" in person.run("delete", "story", "--wait", *PATIENT)
    assert not cluster.list_pods(namespace)
    maps = ("-n", namespace, "get", "configmaps", "-o", "name")
    scene.wait("its script is collected", lambda: "story-script" not in cluster.kubectl(*maps))
    scene.wait("the end of the logs", lambda: logs.poll() is not None)
    assert logs.returncode == 0, path.read_text()[-2000:]
    assert "Deleted" in path.read_text()


def test_ends_of_jobs(scene: Scene, person: Person, edl_store: str) -> None:
    """A job's exit code and output are those of the command that waits for it; what failed is explained afterwards."""
    scene.operator("--store", edl_store)
    (person.folder / "steps.py").write_text(STEPS)
    (person.folder / "faulty.py").write_text(FAULTY)
    waiting, path = person.start(*SUBMIT, "--name", "long", "--env", "STEPS=100000", "--wait", "steps.py")
    good = person.run(*SUBMIT, "--name", "good", "--env", "STEPS=5", "--follow", "--timeout", "250", "steps.py")
    assert [line for line in good.splitlines() if "step " in line] == [
        f"worker-0  | step {step} of rank 0" for step in range(5)
    ]
    assert "job/good: Succeeded" in good
    bad = person.run(*SUBMIT, "--name", "bad", "--wait", "faulty.py", code=1)
    assert "ValueError: no column 'label' in part-0007.parquet" in bad, "the traceback, where it was waited for"
    status = person.run("status", "bad")
    assert 'File "/edl/script/faulty.py", line 2, in load' in status
    assert "ValueError: no column 'label' in part-0007.parquet" in status
    assert "Failed" in status
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(60) == 130
    assert "job/long keeps running" in path.read_text()
    assert person.jobs()["long"]["phase"] in ("Pending", "Running"), "Ctrl-C ends the command, not the job"


def test_without_operator(scene: Scene, person: Person, edl_store: str) -> None:
    cluster, namespace = scene.cluster, scene.namespace
    (person.folder / "steps.py").write_text(STEPS)
    said = person.run(*SUBMIT, "--name", "lonely", "--wait", "--timeout", "18", "steps.py", code=124)
    assert "no operator has handled it" in said
    assert "not handled" in person.run("jobs")
    everywhere = [line for line in person.run("jobs", "-A").splitlines() if "lonely" in line]
    assert any(namespace in line for line in everywhere), everywhere
    watch, watched = person.start("jobs", "--watch")
    scene.wait("a first look", lambda: "lonely" in watched.read_text())
    refused = "--teachers digits: no pool in namespace"
    assert refused in person.run(*SUBMIT, "--teachers", "digits", "steps.py", code=2)
    pool = ("--teachers", "digits=0:2", "--serve", "digits=--callable teacher.py:predict")
    person.run(*SUBMIT, "--name", "first", *pool, "steps.py")
    said = person.run(*SUBMIT, "--name", "second", *pool, "steps.py", code=1)
    assert "omit --serve" in said
    assert "removed again" in said, "a script whose job was not made is not left behind"
    names = cluster.kubectl("-n", namespace, "get", "configmaps,elasticjobs,teacherpools", "-o", "name")
    assert "second" not in names
    person.run(*SUBMIT, "--name", "third", "--teachers", "digits", "steps.py")
    person.run("scale", "pool/digits", "auto", "--min", "1", "--max", "3")
    assert cluster.get("teacherpools", "digits", namespace)["spec"]["maxReplicas"] == 3
    person.run("delete", "lonely", "first", "third", "pool/digits", "--wait", *PATIENT)
    left = ("-n", namespace, "get", "configmaps,elasticjobs,teacherpools", "-o", "name")
    scene.wait("the end of all", lambda: cluster.kubectl(*left).split() == ["configmap/kube-root-ca.crt"])
    scene.wait("a look at nothing", lambda: "No jobs or pools" in watched.read_text())
    assert watch.poll() is None, "it goes on until Ctrl-C"
    watch.send_signal(signal.SIGINT)
    assert watch.wait(60) == 130
    assert "Traceback" not in watched.read_text()


def count_ready(scene: Scene) -> int:
    return int(scene.status("story").get("readyReplicas", 0))


def prefixes(text: str) -> set[str]:
    return {line.partition(" ")[0] for line in text.splitlines() if " | step " in line}
