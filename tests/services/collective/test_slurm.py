"""`srun edl run` on a real Slurm: the script of docs/slurm.md, preempted, signalled, with a failed host, cancelled."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.jobs.collective.job import TRAIN_STATE, Job, wait_until
from tests.jobs.test_readme import ROOT, blocks
from tests.plugins_slurm import NODES, SlurmCluster

pytestmark = pytest.mark.timeout(300)


@dataclass
class BatchJob:
    """A job that was submitted: `steps` is what its workers wrote, with the restart count as the node's name."""

    slurm: SlurmCluster
    id: str
    folder: Path
    steps: Job

    @property
    def output(self) -> str:
        path = self.folder / "output"
        return path.read_text(errors="replace") if path.exists() else "(the job has not begun)"

    def wait_for_state(self, state: str) -> None:
        """Wait until Slurm says that the job is in this state, and no other transition is under way."""
        wait_until(lambda: self.slurm.state(self.id) == state, f"job {self.id} is {state}")

    def last_step(self) -> int:
        """The last step that any rank has finished."""
        return max(step.step for step in self.steps.steps())

    def processes(self, node: str = "") -> list[int]:
        """The tasks and what they started, on a node or on all."""
        wanted = {f"SLURM_JOB_ID={self.id}", "SLURM_STEP_ID=0", *([f"SLURMD_NODENAME={node}"] if node else [])}
        return [pid for pid in self.slurm.processes() if wanted <= set(_environ(pid))]


def _environ(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return []


@pytest.fixture
def submitted(slurm: SlurmCluster, tmp_path: Path) -> Iterator[BatchJob]:
    """The script of docs/slurm.md with a script that counts steps, as soon as both nodes make some."""
    source = TRAIN_STATE.read_text().replace("Path(sys.argv[1])", "Path()")
    (tmp_path / "train.py").write_text(source.replace('environ["NODE"]', 'environ.get("SLURM_RESTART_COUNT", "0")'))
    (script,) = (block.text for block in blocks(ROOT / "docs/slurm.md") if "#SBATCH" in block.text)
    (tmp_path / "train.sbatch").write_text(script)
    number = slurm.ask("sbatch", "--parsable", "--output=output", "train.sbatch", cwd=tmp_path)
    store = f"edl://{NODES[0]}:{29400 + int(number) % 3000}"
    job = BatchJob(slurm, number, tmp_path, Job(tmp_path, name=f"slurm-test-{number}.0", store=store))
    try:
        wait_until(lambda: {(step.rank, step.world) for step in job.steps.steps()} >= {(0, 2), (1, 2)}, "two ranks")
        yield job
    except BaseException:
        print(job.output, slurm.ask("scontrol", "show", "job", number), sep="\n")
        raise
    finally:
        slurm.ask("scancel", number)
        wait_until(lambda: not job.processes(), "the tasks end")
        wait_until(lambda: slurm.state(number) in ("CANCELLED", "COMPLETED", "FAILED"), "Slurm sees the end")
        shutil.rmtree(job.steps.shared_memory, ignore_errors=True)


def test_preempted_job_goes_on(submitted: BatchJob) -> None:
    slurm, folder = submitted.slurm, submitted.folder
    urgent = slurm.ask("sbatch", "--parsable", "-p", "high", "-N2", "--exclusive", "--output=/dev/null", "--wrap=true")
    wait_until(lambda: not submitted.processes(), "the tasks make room")
    last = submitted.last_step()
    wait_until(lambda: slurm.state(urgent) == "COMPLETED", "the urgent job ends")
    shutil.rmtree(submitted.steps.shared_memory)  # as on other hosts
    again = wait_until(lambda: [step for step in submitted.steps.steps() if step.node == "1"], "the job is back")
    assert again[0].step == last + 1, "no step was lost, and none was made twice"
    wait_until(lambda: any(step.node == "1" and step.world == 2 for step in submitted.steps.steps()), "both nodes")
    (folder / "end").touch()
    submitted.wait_for_state("COMPLETED")
    assert "ExitCode=0:0" in slurm.ask("scontrol", "show", "job", submitted.id)


def test_usr1_stores_and_requeues(submitted: BatchJob) -> None:
    submitted.slurm.ask("scancel", "--batch", "--signal=USR1", submitted.id)
    wait_until(lambda: not submitted.processes(), "the tasks leave")
    submitted.wait_for_state("PENDING")
    assert "Restarts=1" in submitted.slurm.ask("scontrol", "show", "job", submitted.id)
    assert f"stored the state after step {submitted.last_step()} at" in submitted.output


def test_failed_host_then_scancel(submitted: BatchJob) -> None:
    slurm = submitted.slurm
    slurm.kill_node(NODES[1], submitted.processes(NODES[1]))
    try:
        wait_until(lambda: any(step.world == 1 for step in submitted.steps.steps()[-1:]), "one node goes on")
        assert slurm.state(submitted.id) == "RUNNING"
        slurm.ask("scancel", submitted.id)
        submitted.wait_for_state("CANCELLED")
        wait_until(lambda: not submitted.processes(), "nothing is left")
    finally:
        slurm.start_node(NODES[1])


def test_each_run_of_a_task_is_a_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A task that is a script with several calls of `edl run`: none of them is taken for the one before."""
    (tmp_path / "train.py").write_text("import sys\nprint('trained', *sys.argv[1:], flush=True)\n")
    (tmp_path / "task.sh").write_text("for seed in 1 2; do edl run --no-prewarm train.py $seed || exit; done\n")
    store = f"export EDL_DISCOVERY=sqlite:///{tmp_path}/store.sqlite"
    line = ("sbatch", "--parsable", "--output=output", f"--wrap={store}; srun -n1 bash task.sh")
    number = slurm.ask(*line, cwd=tmp_path)
    wait_until(lambda: slurm.state(number) in ("COMPLETED", "FAILED"), "the job ends")
    output = (tmp_path / "output").read_text()
    assert [word for word in output.splitlines() if word.startswith("trained")] == ["trained 1", "trained 2"], output
