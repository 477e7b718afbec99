"""`make soak`: everything fails at random, for half an hour, and what came of it is counted.

    python -m tests.soak --minutes 30 --report docs/reliability.md

Exits with 1 if anything was lost, repeated, mislabelled, hung, failed or grown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.plugins_consul import ConsulAgent
from tests.soak.fleet import ROOT, RunningStudent, RunningTeacher, all_faults, leftovers, read_journal, schedule
from tests.soak.student import StudentSpec
from tests.soak.verdict import Outcome, count, growth_of, text_of, write_report
from tests.waiting import wait_until

_OWN_MOUNTS = "EDL_SOAK_OWN_MOUNTS"  # set in the process that has a mount namespace of its own
_DISK_MIB = 24  # larger than a registry and a cache's segments in the making, small enough to be filled at once
_EVERY_S = 2.0  # a fault begins, on average
_HANG_AFTER_S = 90.0  # above the readers' teacher_timeout_s, which is to end a wait by an error
_START_S = 120.0
_SWEPT_S = 30.0  # a teacher looks for students that are gone every five seconds
_SAMPLE_EVERY_S = 5.0
_WITNESSES = ("batch", "cached")  # of shared memory, and of a cache on disk


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="how long faults are injected (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the faults")
    parser.add_argument("--students", default="", help="some of sample,sample_list,batch,stream,ensemble,cached,torch")
    parser.add_argument("--json", type=Path, help="write the outcome there")
    parser.add_argument("--report", type=Path, help="put the outcome into this page, between its markers")
    arguments = parser.parse_args(argv)
    if _OWN_MOUNTS not in os.environ and _can_mount():
        os.environ[_OWN_MOUNTS] = "1"
        command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", "tests.soak"]
        os.execvp("unshare", [*command, *(argv if argv is not None else sys.argv[1:])])
    with tempfile.TemporaryDirectory(prefix="edl-soak-") as folder:
        outcome = Soak(Path(folder), arguments.seed, arguments.students).run(arguments.minutes * 60)
    print(text_of(outcome))
    for error in outcome.problems:
        print(f"\n--- {error}", file=sys.stderr)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(asdict(outcome), indent=2) + "\n")
    if arguments.report is not None:
        write_report(arguments.report, outcome)
    return 0 if outcome.good else 1


def _can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    script = 'd=$(mktemp -d) && mount -t tmpfs -o size=1m tmpfs "$d" && umount "$d"; rmdir "$d"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    return subprocess.run(command, capture_output=True).returncode == 0


class Soak:
    """Processes, faults and the loop that runs them."""

    def __init__(self, folder: Path, seed: int, students: str) -> None:
        self._folder = folder
        self._random = random.Random(seed)
        self._mounts = _OWN_MOUNTS in os.environ
        self._disks: dict[str, Path] = {}
        self._regions_held = 0
        self._registry = self._disk("registry") / "registry.sqlite"
        cache = self._disk("cache") / "labels"
        there = (ROOT / ".tools/consul/consul").exists() or shutil.which("consul") is not None
        self._consul = ConsulAgent(folder / "consul") if there else None
        self._left_out: list[str] = []
        if not self._mounts:
            self._left_out.append("full and read-only disks: mounting is not permitted here")
        if self._consul is None:
            self._left_out.append("Consul: the program is not there (`make tools` fetches it)")
        sqlite = f"sqlite:///{self._registry}"
        consul = self._consul.url if self._consul is not None else sqlite
        where = {"small": sqlite, "other": consul, "image": consul}
        self._teachers = [
            RunningTeacher(service, where[service], anchor=index == 0)
            for service, several in (("small", 3), ("other", 2), ("image", 3))
            for index in range(several)
        ]

        def student(name: str, kind: str, rows: int, *services: str, cache: str = "") -> RunningStudent:
            journal, progress = folder / f"{name}.jsonl", folder / f"{name}.progress"
            urls = [where[service] for service in services]
            spec = StudentSpec(kind, list(services), urls, str(journal), str(progress), cache, rows, seed)
            return RunningStudent(spec, folder, _HANG_AFTER_S, witness=name in _WITNESSES)

        wanted = {
            "batch": student("batch", "batch", 6000, "image"),
            "sample": student("sample", "sample", 2000, "small"),
            "sample_list": student("sample_list", "sample_list", 2000, "small"),
            "stream": student("stream", "stream", 400, "image"),
            "ensemble": student("ensemble", "batch", 4000, "small", "other"),
            "cached": student("cached", "sample", 3000, "small", cache=str(cache)),
            "torch": student("torch", "torch", 1500, "small"),
        }
        self._students = [wanted[name] for name in (students.split(",") if students else wanted)]

    def run(self, seconds: float) -> Outcome:
        """Start everything, inject faults for so long, stop everything, count."""
        done: Counter[str] = Counter()
        try:
            self._start()
            done = self._inject(seconds)
            for student in self._students:
                student.stop()
            anchors = [teacher for teacher in self._teachers if teacher.anchor]
            with contextlib.suppress(TimeoutError):
                wait_until(lambda: not any(teacher.regions for teacher in anchors), deadline_s=_SWEPT_S)
            self._regions_held = sum(teacher.regions for teacher in anchors)
        finally:
            for student in self._students:
                if student.process is not None:
                    student.process.kill()
                    student.process.wait()
            for teacher in self._teachers:
                teacher.close()
            if self._consul is not None:
                self._consul.kill()
            for disk in self._disks.values():
                subprocess.run(["umount", "--lazy", disk], check=True)
        return self._outcome(seconds, done)

    def _start(self) -> None:
        if self._consul is not None:
            self._consul.start()
        for teacher in self._teachers:
            teacher.ensure()
        for teacher in self._teachers:
            assert teacher.process is not None
            teacher.process.wait_ready(_START_S)
        for student in self._students:
            student.ensure()

    def _inject(self, seconds: float) -> Counter[str]:
        """Faults overlap, but no two of one kind."""
        done: Counter[str] = Counter()
        active: dict[str, tuple[contextlib.ExitStack, float]] = {}
        end = time.monotonic() + seconds
        faults = all_faults(self._teachers, self._students, self._registry, self._disks, self._consul)
        plan = schedule(faults, self._random, _EVERY_S)
        fault, after_s, lasts_s = next(plan)
        due, sample_due = time.monotonic() + after_s, 0.0
        try:
            while (now := time.monotonic()) < end:
                for name in [name for name, (_, until) in active.items() if now >= until]:
                    active.pop(name)[0].close()
                if now >= due:
                    if (group := fault.group or fault.name) not in active:
                        undo = contextlib.ExitStack()
                        undo.enter_context(fault.during(self._random))
                        active[group] = (undo, now + lasts_s)
                        done[fault.name] += 1
                    fault, after_s, lasts_s = next(plan)
                    due = now + after_s
                if now >= sample_due:
                    sample_due = now + _SAMPLE_EVERY_S
                    self._look(active)
                time.sleep(0.05)
        finally:
            for undo, _ in active.values():
                undo.close()
        return done

    def _look(self, active: Collection[str]) -> None:
        for teacher in self._teachers:
            teacher.sample()
            if not any(name.startswith(("teacher", "registry", "Consul")) for name in active):
                teacher.ensure()
        for student in self._students:
            student.ensure()
            if "student: SIGSTOP" not in active:
                student.check_progress()

    def _outcome(self, seconds: float, done: Counter[str]) -> Outcome:
        journals = [read_journal(Path(student.spec.journal)) for student in self._students]
        samples = {
            f"student {Path(student.spec.journal).stem}": [
                (record.rss_bytes, record.descriptors, record.threads) for record in journal
            ]
            for student, journal in zip(self._students, journals, strict=True)
            if student.witness
        }
        samples |= {f"teacher {teacher.service}": teacher.samples for teacher in self._teachers if teacher.anchor}
        growths = [growth_of(name, found) for name, found in samples.items()]
        return Outcome(
            minutes=seconds / 60,
            counts=count(record for journal in journals for record in journal),
            faults=dict(sorted(done.items())),
            hangs=[hang for student in self._students for hang in student.hangs],
            ends=[end for student in self._students for end in student.ends],
            growths=[growth for growth in growths if growth is not None],
            regions_held=self._regions_held,
            left_behind=leftovers({pid for student in self._students for pid in student.pids}),
            left_out=self._left_out,
            students=len(self._students),
            teachers=len(self._teachers),
        )

    def _disk(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir()
        if self._mounts:
            self._disks[name] = folder
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "tmpfs", folder], check=True)
        return folder


if __name__ == "__main__":
    sys.exit(main())
