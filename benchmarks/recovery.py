"""After one of three ranks gets SIGKILL: how soon the others finish another step, and how many steps are lost.

All sides train the same model (8.4 million parameters, gloo; each step sleeps 60 ms instead of using a GPU). torchrun
and Ray Train (an elastic group) run workers on one node with checkpoints every 20 steps. torchft runs three replica
groups and is compared with three nodes of `edl run`.

- `sooner`, `vs_ray_train`, `vs_torchft`: the time of torchrun, Ray Train and torchft, divided by that of `edl run`.
- `steps_lost`: the number of repeated steps, divided by the interval between snapshots.
- `join`: the longest pause of two nodes when a third joins under torchrun, divided by that under `edl run` (`join_s`).
- `..._dynamic_rendezvous`: the ratios when a node dies or joins and torchrun's store outlives the nodes.
- `lost_host_s`, `killed_host_s`: recovery after one of three hosts loses all packets, or its processes are killed.
- `p50_s`, `p99_s`, `max_s`, `hangs`: recovery times and hangs in many consecutive kills, at any moment of a step.
- `bare_p50_s`, `bare_p99_s`: the time that forked ranks need without EDL: a process that has imported torch forks three
  ranks, which form a group, build the model, copy a state from memory and finish a step. `vs_bare` divides this time by
  that of `edl run`, which also notices the death and agrees on a new group.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import _launchers as launchers
from benchmarks._child import ROOT, Child
from benchmarks._elastic_events import ADVERSARIES, Event, Outcome, get_over, join, kill_node, kill_rank
from benchmarks._elastic_job import Hang, Job
from benchmarks._elastic_network import Network
from benchmarks._elastic_task import Task
from benchmarks._harness import Goal, Options, Spread, divide, main, note, progress, take_turns
from edl.discovery.served.addresses import ListenAddress
from edl.discovery.served.server import StoreServer

GOALS = [
    Goal("sooner", 8),
    Goal("vs_torchft", 2),
    Goal("vs_ray_train", 5),
    Goal("steps_lost", 1, "at most", always=True),
    Goal("join", 10),
    Goal("join_s", 0.25, "at most"),
    Goal("p50_s", 0.5, "at most"),
    Goal("p99_s", 0.5, "at most"),
    Goal("hangs", 0, "at most"),
]
_WIDTH = 2048
_SLEEP_S = 0.06
_RANKS = 3
_TIMEOUT_S = 60.0
_SETTLE_STEPS = 8
_DEFAULT_KILLS = 200
_WORTH_SAYING = 25
_JOIN_TIMEOUTS_S = {"vs_torchft": 1.0, "vs_torchft_0.2": 0.2, "vs_torchft_0.1": 0.1}
_NODES = "edl run, three nodes"
_RAY_TRAIN = "Ray Train"
_IMPORTS = "import torch, torch.distributed, torch.nn.parallel, benchmarks._elastic_task"
_IN_STORE = "torchrun in a store of its own"

Start = Callable[[Task, ExitStack], Job]


def _forked(task: Task, stack: ExitStack) -> Job:
    return stack.enter_context(launchers.edl_workers(task, _RANKS))


def _torchrun(task: Task, stack: ExitStack) -> Job:
    return stack.enter_context(launchers.torchrun_workers(task, _RANKS))


def _ray_train(task: Task, stack: ExitStack) -> Job:
    return stack.enter_context(launchers.ray_workers(task, _RANKS))


def _torchft(join_timeout_s: float, task: Task, stack: ExitStack) -> Job:
    task = replace(task, save_s=math.inf)  # surviving replicas pass their state to new ones: no file is needed
    return stack.enter_context(launchers.torchft(task, join_timeout_s, stack))


def _task(stack: ExitStack) -> Task:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
    return Task(folder, "0", _WIDTH, _SLEEP_S)


class Kills:
    """A way to train, and the costs of its ranks' deaths so far."""

    def __init__(
        self,
        name: str,
        start: Start,
        *,
        nodes: int = 1,
        saves: bool = False,
        with_agent: bool = False,
    ) -> None:
        self.name = name
        self._start = start
        self._nodes = nodes
        self._saves = saves
        self._with_agent = with_agent
        self._random = random.Random(0)
        self._next = 0
        self.outcomes: list[Outcome] = []
        self.interval = 1
        self.hangs = 0

    def seconds(self, kills: int) -> float:
        """Start a job, kill `kills` ranks, and return the median recovery. One that hung counts as its deadline."""
        found = self.run(kills)
        self.outcomes += found
        return statistics.median(outcome.seconds for outcome in found)

    def run(self, kills: int) -> list[Outcome]:
        """Return the outcome of each kill. If a recovery hangs, another job is started."""
        found: list[Outcome] = []
        while len(found) < kills:
            with ExitStack() as stack:
                job = self._start(_task(stack), stack)
                for number in range(self._nodes):
                    job.start(number)
                try:
                    job.together(count=_SETTLE_STEPS)
                    if self._saves:
                        job.saved(3)
                    while len(found) < kills:
                        if kills > _WORTH_SAYING and len(found) % _WORTH_SAYING == 0:
                            progress(f"{self.name}: {len(found)} of {kills} kills")
                        found.append(get_over(job, self._kill, _TIMEOUT_S))
                        self._settle(job)
                except Hang as hang:
                    self.hangs += 1
                    note(f"**{self.name}: kill {len(found) + 1} hung.** {str(hang).splitlines()[0]}\n")
                    progress(str(hang))  # with the nodes' logs
                    found.append(Outcome(_TIMEOUT_S, _TIMEOUT_S, 0))
                self.interval = max(self.interval, job.step_logs.save_interval())
        return found

    def _kill(self, job: Job) -> Event:
        self._next += 1
        if self._with_agent:
            numbers = sorted(job.nodes)
            return kill_node(job, numbers[self._next % len(numbers)])
        places = job.places()
        return kill_rank(job, places[self._next % len(places)])

    def _settle(self, job: Job) -> None:
        """Start what the job does not start by itself, and let it train until a random moment in a step."""
        for number in range(self._nodes):
            if number not in job.nodes:
                job.start(number)
        job.together(count=_SETTLE_STEPS)
        time.sleep(self._random.uniform(0, 0.3))


def _join_s(start: Start) -> float:
    """Return the pause of two nodes' ranks when a third node joins; infinite if it never trains with them."""
    with ExitStack() as stack:
        job = start(_task(stack), stack)
        for number in range(_RANKS - 1):
            job.start(number)
        job.together(count=3 * _SETTLE_STEPS)
        try:
            return get_over(job, join, _TIMEOUT_S).pause_s
        except Hang as hang:
            progress(f"a join hung: {hang}")
            return math.inf


def _node_dies_s(start: Start) -> float:
    """Return the seconds until both nodes' ranks have finished a step after a third node died; infinite if never."""
    with ExitStack() as stack:
        job = start(_task(stack), stack)
        for number in range(_RANKS):
            job.start(number)
        job.together(count=3 * _SETTLE_STEPS)
        try:
            return get_over(job, lambda job: kill_node(job, 1), _TIMEOUT_S).seconds
        except Hang as hang:
            progress(f"a node's death hung: {hang}")
            return math.inf


def _nodes(task: Task, stack: ExitStack) -> Job:
    return stack.enter_context(launchers.edl_nodes(task, _RANKS))


def _torchrun_nodes(task: Task, stack: ExitStack) -> Job:
    return stack.enter_context(launchers.torchrun_nodes(task, _RANKS))


def _torchrun_in_store(task: Task, stack: ExitStack) -> Job:
    return stack.enter_context(launchers.torchrun_nodes_in_store(task, _RANKS))


def _sides(quick: bool) -> dict[str, Kills]:
    sides = {
        "edl run": Kills("edl run", _forked, saves=True),
        "torchrun": Kills("torchrun", _torchrun),
    }
    if launchers.RAY.exists():
        sides[_RAY_TRAIN] = Kills(_RAY_TRAIN, _ray_train)
    else:
        note("Ray is not installed (tools/ray.sh): Ray Train is not compared.\n")
    if not launchers.TORCHFT.exists():
        note("torchft is not installed (tools/torchft.sh): not compared.\n")
        return sides
    sides[_NODES] = Kills(_NODES, _nodes, nodes=_RANKS, saves=True, with_agent=True)
    for join_timeout_s in [1.0] if quick else [*_JOIN_TIMEOUTS_S.values(), 60.0]:
        name = _torchft_name(join_timeout_s)
        sides[name] = Kills(name, partial(_torchft, join_timeout_s), nodes=_RANKS)
    return sides


def _torchft_name(join_timeout_s: float) -> str:
    return f"torchft, join timeout {join_timeout_s:g} s"


def _bare_s(bare: Child) -> float:
    """Return the seconds that three forked ranks take to finish their first step without EDL."""
    return float(bare.ask(width=_WIDTH, sleep_s=_SLEEP_S, ranks=_RANKS)["seconds"])


def _import_s() -> float:
    """Return the seconds that a new torchrun worker takes to import the modules for training."""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", _IMPORTS], cwd=ROOT, check=True, timeout=_TIMEOUT_S)
    return time.monotonic() - begin


def measure(options: Options, kills: int = _DEFAULT_KILLS) -> dict[str, list[float]]:
    """Return the figures of every round, and of `kills` consecutive kills."""
    sides = _sides(options.quick)
    each = 1 if options.quick else 3
    turns: dict[str, Callable[[], float]] = {name: partial(side.seconds, each) for name, side in sides.items()}
    with Child([sys.executable, "-m", "benchmarks._elastic_bare"]) as bare:
        turns["bare"] = lambda: statistics.median(_bare_s(bare) for _ in range(each))
        rounds = take_turns({**turns, "imports": _import_s}, options.repeats)
    forked = sides["edl run"]
    figures = {"sooner": divide(rounds["torchrun"], rounds["edl run"])}
    workers_s = [whole - imports for whole, imports in zip(rounds["torchrun"], rounds["imports"], strict=True)]
    figures["vs_bare"] = divide(rounds["bare"], rounds["edl run"])
    figures["sooner_without_imports"] = divide(workers_s, rounds["edl run"])
    if _RAY_TRAIN in rounds:
        figures["vs_ray_train"] = divide(rounds[_RAY_TRAIN], rounds["edl run"])
    for key, join_timeout_s in _JOIN_TIMEOUTS_S.items():
        if _torchft_name(join_timeout_s) in rounds:
            figures[key] = divide(rounds[_torchft_name(join_timeout_s)], rounds[_NODES])
    figures["steps_lost"] = [kill.lost / forked.interval for kill in forked.outcomes if kill.seconds < _TIMEOUT_S]
    _tell(sides)
    if not options.quick:
        figures |= _joins(max(1, options.repeats // 2))
        figures |= _node_deaths(max(1, options.repeats // 2))
        figures |= _lost_hosts(max(1, options.repeats // 2))
        figures |= _many(forked, kills)
        _adversaries()
    return figures


def _tell(sides: dict[str, Kills]) -> None:
    lines = ["| launcher | seconds to the last survivor's next step | steps lost | hung |", "| --- | --- | --- | --- |"]
    for side in sides.values():
        seconds, lost = (
            Spread.of([float(value) for value in values])
            for values in ([outcome.seconds for outcome in side.outcomes], [outcome.lost for outcome in side.outcomes])
        )
        lines.append(f"| {side.name} | {seconds} | {lost} | {side.hangs} of {len(side.outcomes)} |")
    note("\n".join(lines) + "\n")
    note(f"Snapshots of `edl run` were at most {sides['edl run'].interval} steps apart.\n")


def _joins(repeats: int) -> dict[str, list[float]]:
    """Return the pauses when a node joins, and torchrun's divided by those of `edl run`."""
    starts = {
        "edl run": partial(_join_s, _nodes),
        "torchrun": partial(_join_s, _torchrun_nodes),
        _IN_STORE: partial(_join_s, _torchrun_in_store),
    }
    pauses = take_turns(starts, repeats)
    _note_seconds("Pause when a node joins", pauses)
    figures = _against(pauses, "torchrun", {"edl run": "join"})
    figures |= _against(pauses, _IN_STORE, {"edl run": "join_vs_dynamic_rendezvous"})
    return figures | {"join_s": pauses["edl run"]}


def _node_deaths(repeats: int) -> dict[str, list[float]]:
    """Return how long the other nodes need when a node dies, with torch's rendezvous and with EDL's."""
    starts = {"edl run": partial(_node_dies_s, _nodes), _IN_STORE: partial(_node_dies_s, _torchrun_in_store)}
    seconds = take_turns(starts, repeats)
    _note_seconds("A node dies", seconds)
    return _against(seconds, _IN_STORE, {"edl run": "vs_dynamic_rendezvous"})


def _lost_hosts(repeats: int) -> dict[str, list[float]]:
    """Return how long the other hosts need when a host is cut off, and when its processes are killed."""
    try:
        with Network(1):
            pass
    except OSError as exc:
        note(f"No lost hosts: network namespaces cannot be made here ({exc}).\n")
        return {}
    sides = {"lost_host_s": partial(_host_dies_s, cut=True), "killed_host_s": partial(_host_dies_s, cut=False)}
    seconds = take_turns(sides, repeats)
    _note_seconds("A host is", {"cut off": seconds["lost_host_s"], "killed": seconds["killed_host_s"]})
    return seconds


def _host_dies_s(*, cut: bool) -> float:
    """Return the seconds until both other hosts' ranks have finished a step without the third; infinite if never."""
    with ExitStack() as stack:
        network = stack.enter_context(Network(_RANKS))
        task = _task(stack)
        server = StoreServer(str(task.folder / "served.sqlite"), ListenAddress(network.address, 0))
        stack.callback(server.close)
        job = stack.enter_context(launchers.edl_hosts(task, network, f"edl://{network.address}:{server.port}"))
        for number in range(_RANKS):
            job.start(number)
        job.together(count=3 * _SETTLE_STEPS)

        def lose_host(job: Job) -> Event:
            network.cut(1)
            return Event(job.lose(1), job.places(), job.places())

        try:
            return get_over(job, lose_host if cut else lambda job: kill_node(job, 1), _TIMEOUT_S).seconds
        except Hang as hang:
            progress(f"the loss of a host hung: {hang}")
            return math.inf


def _note_seconds(what: str, seconds: dict[str, list[float]]) -> None:
    for name, all_s in seconds.items():
        came = [found_s for found_s in all_s if found_s < math.inf]
        hung = f", {len(all_s) - len(came)} of {len(all_s)} hung" if len(came) < len(all_s) else ""
        note(f"{what}, {name}: {Spread.of(came) if came else 'never'} s{hung}.")


def _against(seconds: dict[str, list[float]], them: str, keys: dict[str, str]) -> dict[str, list[float]]:
    """Return their seconds divided by ours. `keys` names the figure of each of our sides.

    Rounds in which they hang are left out, so that EDL does not gain from them. If EDL hangs, the ratio is 0.
    """
    kept = [number for number, their_s in enumerate(seconds[them]) if their_s < math.inf]
    theirs, *ours = ([seconds[name][number] for number in kept] for name in (them, *keys))
    return {key: divide(theirs, our_s) for key, our_s in zip(keys.values(), ours, strict=True) if kept}


def _many(side: Kills, kills: int) -> dict[str, list[float]]:
    """Return the distribution of recoveries over many kills."""
    if not kills:
        return {}
    side.hangs = 0
    with Child([sys.executable, "-m", "benchmarks._elastic_bare"]) as bare:
        bare_s = sorted(_bare_s(bare) for _ in range(kills))
    seconds = sorted(outcome.seconds for outcome in side.run(kills))
    p99, bare_p99 = (all_s[min(kills - 1, round(0.99 * kills))] for all_s in (seconds, bare_s))
    note(f"{side.name}, {kills} kills: {Spread.of(seconds)} s, p99 {p99:.3g} s, {side.hangs} hung.\n")
    figures = {"p50_s": statistics.median(seconds), "p99_s": p99, "max_s": seconds[-1], "hangs": float(side.hangs)}
    figures |= {"bare_p50_s": statistics.median(bare_s), "bare_p99_s": bare_p99}
    return {key: [value] for key, value in figures.items()}


def _adversaries() -> None:
    """Note a table of other events that can happen to three `edl run` nodes."""
    lines = [
        "\nThree nodes with a rank each:\n",
        "| what happens | seconds to the slowest survivor's next step | pause | steps lost |",
        "| --- | ---: | ---: | ---: |",
    ]
    pending = dict(ADVERSARIES)
    progress("other adversaries")
    while pending:
        with ExitStack() as stack:
            job = _nodes(_task(stack), stack)
            try:
                for name in list(pending):
                    for number in range(_RANKS):
                        if number not in job.nodes:
                            job.start(number)
                    job.together(count=_SETTLE_STEPS)
                    outcome = get_over(job, pending.pop(name), _TIMEOUT_S)
                    lines.append(f"| {name} | {outcome.seconds:.2f} | {outcome.pause_s:.2f} | {outcome.lost} |")
            except Hang as hang:
                lines.append(f"| {name} | **hung** | | |")
                note(f"**{name}: hung.** {hang}\n")
    note("\n".join(lines) + "\n")


if __name__ == "__main__":
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--kills", type=int, default=_DEFAULT_KILLS, help="consecutive kills (default %(default)s)")
    main("recovery", partial(measure, kills=own.parse_known_args()[0].kills), GOALS, __doc__, own=[own])
