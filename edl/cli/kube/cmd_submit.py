"""`edl submit`: start an elastic job on Kubernetes, and teachers with it, from a command line or a file."""

from __future__ import annotations

import argparse
import secrets
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from edl.cli._changes import printable
from edl.cli.kube.cmd_logs import LogScreen
from edl.cli.kube.connection import add_cluster_options, command_parser, open_cluster
from edl.cli.kube.member_logs.follower import FollowOptions, LogFollower
from edl.cli.kube.phases import wait_for_end
from edl.cli.kube.submission.files import dump_manifests, load_template, read_manifests
from edl.cli.kube.submission.manifests import make_submission
from edl.cli.kube.submission.options import (
    ReplicaRange,
    SubmitOptions,
    check_name,
    parse_environment,
    parse_teachers,
)
from edl.cli.kube.submission.script import LocalScript, read_script
from edl.cli.kube.submission.sending import check_manifests, create_all, find_pools, set_bounds
from edl.cli.kube.targets import Target
from edl.errors import EDLError, SettingsError
from edl.kube.client import KubeClient

__all__ = ["main"]

_EXIT_TIMEOUT: Final = 124
"""As `timeout` of coreutils has it."""

_FLAGS: Final = ("--dry-run", "--wait", "--follow", "-m", "--module", "--script-in-image", "-h", "--help")
"""Options without a value."""

_DESCRIPTION = """\
Makes an ElasticJob, which EDL's operator runs: elastic workers, each `edl run SCRIPT ARGS...` in a pod. A SCRIPT of
this machine is sent along in a ConfigMap (that file alone, below 700 KB); one that is in the image needs
--script-in-image. --teachers asks for a pool of teachers beside it, which grows into GPUs that are idle."""

_EXAMPLES = """\
examples:
  edl submit --image registry/student:1 --gpus 1 --workers 1:8 train.py --lr 0.1
  edl submit --image registry/student:1 --teachers digits=0:4 \\
      --serve 'digits=--torch-factory teacher:make_model --input image:float32[1,8,8]' train.py
  edl submit --image registry/student:1 --workers 2 --follow train.py     with the logs, and the job's exit code
  edl submit --image registry/student:1 --dry-run train.py | kubectl apply -f -
  edl submit -f job.yaml --wait                                           jobs and pools of a file

Options of this command stand before SCRIPT; what follows SCRIPT is the script's own. Both are sent as they are typed:
Kubernetes replaces $(NAME) only in files that are written by hand."""


def main(argv: Sequence[str]) -> int:
    """Run `edl submit`."""
    parser = _parser(with_script=not _names_file(argv))
    options = parser.parse_args(argv)
    if options.timeout is not None and not (options.wait or options.follow):
        raise SettingsError(f"--timeout {options.timeout:g}: is of --wait and --follow")
    if options.timeout is not None and not options.timeout > 0:
        raise SettingsError(f"--timeout {options.timeout:g}: must be above 0")
    if options.file is not None:
        submit_options = None
        manifests = read_manifests(options.file)
        _refuse_beside_file(parser, options)
    else:
        submit_options = _submit_options(options)
        script = _local_script(options)
        manifests = list(make_submission(submit_options, script).objects)
    check_manifests(manifests)
    if options.dry_run:
        for manifest in manifests:
            if options.namespace:
                manifest["metadata"].setdefault("namespace", options.namespace)
        print(dump_manifests(manifests), end="")
        return 0
    with open_cluster(options) as client:
        if submit_options is not None:
            pools = find_pools(client, submit_options.teachers)
            services = {name: (pool.get("spec") or {}).get("service") for name, pool in pools.items()}
            manifests = list(make_submission(_with_services(submit_options, services), script).objects)
        made = create_all(client, manifests, client.namespace, _note)
        if submit_options is not None:
            set_bounds(client, submit_options.teachers, pools, _note)
        jobs = [Target("job", item["metadata"]["name"], item) for item in made if item["kind"] == "ElasticJob"]
        for job in jobs:
            print(printable(job.name), flush=True)
        if not options.wait and not options.follow:
            return 0
        if len(jobs) != 1 or jobs[0].resource["metadata"]["namespace"] != client.namespace:
            raise SettingsError(
                f"--wait and --follow are for a single job in namespace {client.namespace!r} (-n), and there are "
                f"{len(jobs)}: they were submitted, and `edl jobs --watch` shows them"
            )
        return _await_end(client, jobs[0], options)


def _await_end(client: KubeClient, job: Target, options: argparse.Namespace) -> int:
    """Wait for the job's end, which Ctrl-C does not bring about."""
    deadline = None if options.timeout is None else time.monotonic() + options.timeout
    try:
        if options.follow:
            screen = LogScreen(prefix=True)
            phase = LogFollower(client, job, FollowOptions(), screen.write, _note).run(deadline=deadline)
        else:
            phase = wait_for_end(client, job, _note, deadline=deadline)
    except (EDLError, KeyboardInterrupt):
        _note(f"{job} goes on: `edl logs {job.name} -f` follows it again, `edl delete {job.name}` ends it")
        raise
    if not phase:
        _note(f"{job} goes on after {options.timeout:g} s: `edl logs {job.name} -f` follows it again")
        return _EXIT_TIMEOUT
    return 0 if phase == "Succeeded" else 1


def _note(words: str) -> None:
    sys.stdout.flush()
    for line in words.splitlines():
        print(printable(f"edl submit: {line}"), file=sys.stderr)
    sys.stderr.flush()


def _local_script(options: argparse.Namespace) -> LocalScript | None:
    if options.module or options.script_in_image:
        return None
    script = read_script(options.script)
    _note(
        f"{script.path} ({len(script.content):,} bytes) is sent along as {script.path_in_pod}, that file alone: what "
        "it imports or reads besides must be in the image (with all in the image: --script-in-image)"
    )
    return script


def _submit_options(options: argparse.Namespace) -> SubmitOptions:
    if not options.image and not options.template:
        raise SettingsError("--image is missing: which image has Python, edl and what the script imports?")
    for name in ("gpus", "teacher_gpus", "nproc_per_node"):
        value = getattr(options, name)
        lowest = 1 if name == "nproc_per_node" else 0
        if value is not None and value < lowest:
            raise SettingsError(f"--{name.replace('_', '-')} {value}: must be {lowest} or more")
    stem = Path(options.script).stem if not options.module else options.script.rpartition(".")[2]
    return SubmitOptions(
        name=check_name(options.name) if options.name else _make_name(stem),
        script=options.script,
        arguments=tuple(options.arguments),
        module=options.module,
        run=_split("--run", options.run),
        image=options.image,
        command=_split("--command", options.command),
        workers=ReplicaRange.parse(options.workers, "--workers", 1),
        processes=options.nproc_per_node,
        gpus=options.gpus,
        cpu=_quantity("--cpu", options.cpu),
        memory=_quantity("--memory", options.memory),
        environment=parse_environment(options.env),
        store=options.store,
        checkpoint=options.checkpoint,
        queue=options.queue,
        priority_class=options.priority_class,
        teachers=parse_teachers(options.teachers, options.serve),
        teacher_image=options.teacher_image,
        teacher_gpus=options.gpus if options.teacher_gpus is None else options.teacher_gpus,
        template=load_template(options.template) if options.template else {},
    )


def _with_services(options: SubmitOptions, services: Mapping[str, str | None]) -> SubmitOptions:
    """Return the options, with EDL_SERVICE where the job's only pool exists and serves under another name."""
    service = services.get(options.teachers[0].service) if len(options.teachers) == 1 else None
    return replace(options, environment={"EDL_SERVICE": service} | options.environment) if service else options


def _make_name(stem: str) -> str:
    """Return a name that is free, after the script's."""
    words = "".join(char if char.isascii() and char.isalnum() else "-" for char in stem.lower()).strip("-")[:40]
    return f"{words.strip('-') or 'job'}-{secrets.token_hex(3)}"


def _split(option: str, spelled: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(spelled))
    except ValueError as exc:
        raise SettingsError(f"{option} {spelled!r}: {exc}: quote it as a shell would have it") from exc


def _quantity(option: str, spelled: str) -> str:
    """Return an amount as Kubernetes spells it, checked."""
    from edl.kube.quantity import parse_quantity

    if spelled:
        try:
            amount = parse_quantity(spelled)
        except ValueError as exc:
            raise SettingsError(f"{option} {spelled!r}: expected an amount such as 500m, 2 or 16Gi") from exc
        if amount <= 0:
            raise SettingsError(f"{option} {spelled!r}: must be above 0")
    return spelled


def _refuse_beside_file(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse options that would be ignored."""
    allowed = ("file", "dry_run", "wait", "follow", "timeout", "namespace", "context", "kubeconfig")
    for name, value in vars(options).items():
        if name not in allowed and value != parser.get_default(name):
            option = f"--{name.replace('_', '-')}"
            raise SettingsError(f"-f {options.file} and {option}: the file says it all; leave either out")


def _names_file(argv: Sequence[str]) -> bool:
    """Whether `-f` stands among the options before the script: argparse has no such either-or for positionals."""
    index = 0
    while index < len(argv) and argv[index].startswith("-") and argv[index] != "--":
        if argv[index].startswith(("-f", "--file")):
            return True
        attached = "=" in argv[index] or (len(argv[index]) > 2 and not argv[index].startswith("--"))  # -nNAMESPACE
        index += 1 if attached or argv[index] in _FLAGS else 2
    return False


def _parser(*, with_script: bool) -> argparse.ArgumentParser:
    parser = command_parser("submit", _DESCRIPTION, _EXAMPLES)
    parser.allow_abbrev = False
    parser.usage = "edl submit [OPTIONS] SCRIPT [ARGS...]\n       edl submit -f FILE [--wait | --follow]"
    add = parser.add_argument
    if with_script:
        add("script", metavar="SCRIPT", help="what `edl run` is to run; with -m a module's name; instead of -f")
        add("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own")
    add("-f", "--file", metavar="FILE", help="a file of jobs and pools in YAML or JSON; - for standard input")
    add("--dry-run", action="store_true", help="print the YAML, which `kubectl apply -f -` takes, and ask no cluster")
    add("--wait", action="store_true", help="return when the job has ended, with 0 if it succeeded and 1 if not")
    add("--follow", action="store_true", help="the same, and show what its workers write")
    add(
        "--timeout", type=float, metavar="S", help="of --wait and --follow: return 124 after S seconds; the job goes on"
    )
    add = parser.add_argument_group("workers").add_argument
    add("--image", default="", metavar="IMAGE", help="with Python, edl and what the script imports")
    add("--name", default="", metavar="NAME", help="of the job (default: the script's, and six hexadecimal digits)")
    add("--workers", default="1", metavar="MIN:MAX", help="pods: begin with MIN, grow to MAX (default: 1)")
    add("--gpus", type=int, default=0, metavar="N", help="of each pod (default: 0)")
    add("--cpu", default="", metavar="AMOUNT", help="requested by each pod, such as 2 or 500m")
    add("--memory", default="", metavar="AMOUNT", help="requested by each pod, and its limit, such as 16Gi")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of the workers; may be repeated")
    add("--nproc-per-node", type=int, metavar="N", help="processes in each pod (default: one a GPU, or one)")
    add("--run", default="", metavar="OPTIONS", help="more options of `edl run`, such as '--max-restarts 3'")
    add("-m", "--module", action="store_true", help="SCRIPT is a module in the image, as of `python -m`")
    add("--script-in-image", action="store_true", help="SCRIPT is a path in the image: send nothing along")
    add("--command", default="", metavar="WORDS", help="how the image starts edl (default: edl)")
    add("--template", default="", metavar="FILE", help="a pod template to begin with: volumes, tolerations, ...")
    add("--store", default="", metavar="URL", help="where members find one another (default: the operator's)")
    add("--checkpoint", default="", metavar="URL", help="where the job's state is stored")
    add("--queue", default="", metavar="NAME", help="of Kueue")
    add("--priority-class", default="", metavar="NAME", help="of the pods")
    add = parser.add_argument_group("teachers").add_argument
    add(
        "--teachers",
        action="append",
        default=[],
        metavar="SERVICE=MIN:MAX",
        help="a pool of teachers: one that exists (its bounds are set to these, if any are given), or, with --serve, a "
        "new one; the workers' EDL_SERVICE names it where there is a single one; may be repeated",
    )
    add("--serve", action="append", default=[], metavar="SERVICE=ARGS", help="what follows `edl serve` in its pods")
    add("--teacher-image", default="", metavar="IMAGE", help="(default: --image)")
    add("--teacher-gpus", type=int, metavar="N", help="of each teacher (default: --gpus)")
    add_cluster_options(parser)
    return parser
