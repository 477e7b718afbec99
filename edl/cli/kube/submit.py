"""`edl submit`: start an elastic job on Kubernetes, optionally with teachers, from a command line or a file."""

from __future__ import annotations

import argparse
import importlib
import secrets
import time
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from edl.cli.kube.logs import LogFollower, LogScreen
from edl.cli.kube.manifests import (
    LocalScript,
    ReplicaRange,
    RequestedPool,
    by_name,
    dump_manifests,
    find_slips,
    load_template,
    make_submission,
    manifest_type,
    pool_command,
    pool_range,
    quantity,
    read_manifests,
    read_script,
    replica_range,
    requested_pools,
    resource_name,
    split_words,
    variable,
)
from edl.cli.kube.workloads import SCRIPT_LABEL, Target, add_cluster_options, open_cluster
from edl.cli.output import print_note, printable
from edl.collective.checkpoint.storage.folder import find_scheme_problem
from edl.command_line import CommandParser, at_least, duration
from edl.dashboard.state.cluster import decode_workload
from edl.errors import ConflictError, EDLError, InvalidObjectError, KubernetesError, SettingsError
from edl.kube.client import KubeClient
from edl.kube.objects import Object
from edl.kube.resource_types import CONFIG_MAPS, ELASTIC_JOBS, TEACHER_POOLS
from edl.master.kube.resources import ElasticJob, parse_elastic_job, parse_teacher_pool
from edl.quoting import did_you_mean, quote

_EXIT_TIMEOUT: Final = 124
"""Exit code after a timeout, the same as that of coreutils' `timeout`."""

_DESCRIPTION = """\
Creates an ElasticJob for EDL's operator: elastic workers, each with `edl run SCRIPT ARGS...` in a pod. A SCRIPT on
this machine is sent in a ConfigMap (only that file, under 700 KB); a script in the image needs --script-in-image.
--teachers adds a pool of teachers, which grows onto idle GPUs."""

_EXAMPLES = """\
examples:
  edl submit --image registry/student:1 --gpus 1 --workers 1:8 train.py --lr 0.1
  edl submit --image registry/student:1 --teachers digits=0:4 \\
      --serve 'digits=--torch-factory teacher:make_model --input image:float32[1,8,8]' train.py
  edl submit --image registry/student:1 --workers 2 --follow train.py     with the logs, and the job's exit code
  edl submit --image registry/student:1 --dry-run train.py | kubectl apply -f -
  edl submit -f job.yaml --wait                                           jobs and pools from a file"""

_DETAILS = """\
Options of this command precede SCRIPT; everything after SCRIPT is passed to the script. Both parts are sent as
typed: Kubernetes expands $(NAME) only in files written by hand."""


def main(argv: Sequence[str]) -> int:
    """Run `edl submit`."""
    options = parse_options(argv)
    script = None
    if options.file is not None:
        manifests = read_manifests(options.file)
    else:
        script = _local_script(options)
        manifests = make_submission(options, script)
    check_manifests(manifests)
    if options.file is None:
        _check_commands(options)
    if options.dry_run:
        for manifest in manifests:
            if options.namespace:
                manifest["metadata"].setdefault("namespace", options.namespace)
        print(dump_manifests(manifests), end="")
        return 0
    pools: dict[str, Object] = {}
    with open_cluster(options) as client:
        if options.file is None:
            pools = find_pools(client, options.teachers)
            if len(options.teachers) == 1 and pools:  # several pools provide the same service
                (service, *_) = (decode_workload("pool", pool).job_id for pool in pools.values())
                options.env = {"EDL_SERVICE": service} | options.env
            manifests = make_submission(options, script)
        made = create_all(client, manifests, client.namespace, _note)
        pools = {item["metadata"]["name"]: item for item in made if item["kind"] == "TeacherPool"} | pools
        jobs = [Target("job", item["metadata"]["name"], item) for item in made if item["kind"] == "ElasticJob"]
        for job in jobs:
            print(printable(job.name), flush=True)
        if not options.wait and not options.follow:
            return 0
        if len(jobs) != 1 or jobs[0].resource["metadata"]["namespace"] != client.namespace:
            raise SettingsError(
                f"--wait and --follow need a single job in namespace {client.namespace!r} (-n), but there are "
                f"{len(jobs)}: they were submitted; `edl jobs --watch` shows them"
            )
        return _await_end(client, jobs[0], [Target("pool", name, pool) for name, pool in pools.items()], options)


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the options, and complete those of a job: its name, environment, teachers and template."""
    parser = _parser()
    options: argparse.Namespace = parser.parse_args(argv)
    if options.timeout is not None and not (options.wait or options.follow):
        raise SettingsError(f"--timeout {options.timeout:g}s: requires --wait or --follow")
    if options.file is not None:
        _refuse_beside_file(parser, options)
        return options
    if not options.image and not options.template:
        raise SettingsError("--image is missing: which image has Python, edl and what the script imports?")
    stem = Path(options.script).stem if not options.module else options.script.rpartition(".")[2]
    options.name = options.name or _make_name(stem)
    options.env = by_name("--env", options.env)
    options.teachers = requested_pools(by_name("--teachers", options.teachers), by_name("--serve", options.serve))
    if options.teacher_gpus is None:
        options.teacher_gpus = options.gpus
    options.template = load_template(options.template) if options.template else {}
    return options


def _await_end(client: KubeClient, job: Target, pools: Sequence[Target], options: argparse.Namespace) -> int:
    """Wait for the job to end. Ctrl-C stops the wait, not the job."""
    deadline = None if options.timeout is None else time.monotonic() + options.timeout
    write = LogScreen(prefix=True).write if options.follow else None
    follower = LogFollower(client, job, write, _note, pools=pools)
    try:
        phase = follower.run(deadline=deadline)
    except (EDLError, KeyboardInterrupt):
        _note(f"{job} keeps running: `edl logs {job.name} -f` follows it again, `edl delete {job.name}` ends it")
        raise
    if not phase:
        what = "has not ended" if follower.phases.taken_up else "has not been handled by an operator"
        _note(f"{job} {what} after {options.timeout:g} s: `edl logs {job.name} -f` follows it again")
        return _EXIT_TIMEOUT
    if phase == "Deleted":
        _note(f"{job} was deleted before it ended")
    return 0 if phase == "Succeeded" else 1


def _note(words: str) -> None:
    print_note("edl submit", words)


def _check_commands(options: argparse.Namespace) -> None:
    """Refuse options that `edl run` or `edl serve` would refuse in a pod, as far as this machine can check."""
    if options.run:
        try:
            from edl.collective.agent.command_line.options import parser
        except ModuleNotFoundError:  # torch is in the image only
            pass
        else:
            try:
                parser().parse_args([*options.run, "script.py"])
            except SettingsError as exc:
                raise SettingsError(f"--run: {exc}") from exc
    serving = [entry.module for entry in entry_points(group="edl.commands") if entry.name == "serve"]
    for pool in options.teachers:
        if pool.serve is not None and serving:
            check = getattr(importlib.import_module(serving[0]), "check_arguments", None)
            try:
                if check is not None:
                    check([*pool.serve, "--service", pool.service])
            except SettingsError as exc:
                raise SettingsError(f"--serve {pool.service}=…: {exc}") from exc


def _local_script(options: argparse.Namespace) -> LocalScript | None:
    if options.module or options.script_in_image:
        return None
    script = read_script(options.script)
    _note(
        f"{script.path} ({len(script.content):,} bytes) is sent as {script.path_in_pod}, and no other file: "
        "everything that it imports or reads must be in the image (if it is there itself, pass --script-in-image)"
    )
    return script


def _make_name(stem: str) -> str:
    words = "".join(char if char.isascii() and char.isalnum() else "-" for char in stem.lower()).strip("-")[:40]
    return f"{words.strip('-') or 'job'}-{secrets.token_hex(3)}"


def _refuse_beside_file(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse options that would be ignored because of `-f`."""
    allowed = ("file", "dry_run", "wait", "follow", "timeout", "namespace", "context", "kubeconfig")
    for name, value in vars(options).items():
        if name not in allowed and value != parser.get_default(name):
            option = "SCRIPT" if name == "script" else f"--{name.replace('_', '-')}"
            raise SettingsError(f"-f {options.file} and {option}: the file sets everything; omit one of the two")


def _parser() -> CommandParser:
    parser = CommandParser("edl submit", _DESCRIPTION, _EXAMPLES, _DETAILS)
    parser.usage = "edl submit [OPTIONS] SCRIPT [ARGS...]\n       edl submit -f FILE [--wait | --follow]"
    add = parser.add_argument
    manifests = "jobs and pools in YAML or JSON, instead of SCRIPT; - for standard input"
    add("-f", "--file", action=_File, metavar="FILE", help=manifests)
    add("--dry-run", action="store_true", help="print YAML for `kubectl apply -f -`; contact no cluster")
    add("--wait", action="store_true", help="return when the job has ended: 0 if it succeeded, 1 if not")
    add("--follow", action="store_true", help="like --wait, and show the workers' output")
    limit = "limit for --wait and --follow: return 124 then; the job keeps running"
    add("--timeout", type=duration(), metavar="TIME", help=limit)
    add = parser.add_argument_group("workers").add_argument
    add("--image", default="", metavar="IMAGE", help="image with Python, edl and what the script imports")
    add("--name", type=resource_name, metavar="NAME", help="the job's name (default: the script's plus six hex digits)")
    size = "pods: begin with MIN, grow to MAX (default: 1)"
    add("--workers", type=replica_range(1), default=ReplicaRange(1, 1), metavar="MIN:MAX", help=size)
    add("--gpus", type=at_least(0), default=0, metavar="N", help="GPUs of each pod (default: 0)")
    add("--cpu", type=quantity, metavar="AMOUNT", help="CPU request of each pod, such as 2 or 500m")
    add("--memory", type=quantity, metavar="AMOUNT", help="memory request and limit of each pod, such as 16Gi")
    value = "environment variable of the workers; repeatable"
    add("--env", type=variable, action="append", default=[], metavar="NAME=VALUE", help=value)
    add(
        "--store",
        "--discovery",
        dest="store",
        default="",
        metavar="URL",
        help="store where members meet (default: the operator's)",
    )
    add("--checkpoint", default="", metavar="URL", help="where the job's state is stored")
    add = parser.add_argument_group("teachers").add_argument
    pool = "service of a new pool (with --serve) or of an existing one; EDL_SERVICE names it if it is alone; repeatable"
    add("--teachers", type=pool_range, action="append", default=[], metavar="SERVICE[=MIN:MAX]", help=pool)
    command = "arguments of `edl serve` in the pool's pods"
    add("--serve", type=pool_command, action="append", default=[], metavar="SERVICE=ARGS", help=command)
    add_cluster_options(parser)
    add = parser.add_advanced_group("more about the pods").add_argument
    processes = "processes in each pod (default: one per GPU, or one)"
    add("--nproc-per-node", type=at_least(1), metavar="N", help=processes)
    more = "more options of `edl run`, such as '--max-restarts 3'"
    add("--run", type=split_words, default=(), metavar="OPTIONS", help=more)
    add("-m", "--module", action="store_true", help="SCRIPT is a module in the image, as for `python -m`")
    add("--script-in-image", action="store_true", help="SCRIPT is a path in the image; no file is sent")
    add("--template", default="", metavar="FILE", help="a pod template to start from: volumes, tolerations, ...")
    add("--queue", default="", metavar="NAME", help="Kueue queue")
    add("--priority-class", default="", metavar="NAME", help="priority class of the pods")
    add("--teacher-image", default="", metavar="IMAGE", help="image of the teachers (default: --image)")
    add("--teacher-gpus", type=at_least(0), metavar="N", help="GPUs of each teacher (default: --gpus)")
    add = parser.add_argument
    add("script", metavar="SCRIPT", help="script for `edl run`; with -m, a module's name")
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the script")
    return parser


class _File(argparse.Action):
    """Stores the file, and makes SCRIPT optional: argparse cannot express this alternative to positionals."""

    def __call__(self, parser: argparse.ArgumentParser, options: argparse.Namespace, text: Any, *_: object) -> None:
        options.file = text
        for action in parser._positionals._group_actions:
            action.required = False


# --- Checking and creating the resources ---
#
# If a resource is refused, the earlier ones are deleted. If the API server does not respond, it may have created the
# resource, so nothing is deleted: the error lists what exists.

_ANY_STORE: Final = "edl://store"
"""Store to assume when checking a job that names none: the operator's default store is unknown here."""


def check_manifests(manifests: Sequence[Object]) -> None:
    """Refuse specs that the operator would refuse, and fields that the API server would drop without an error."""
    for manifest in manifests:
        kind = manifest_type(manifest)
        if kind == CONFIG_MAPS:
            continue
        parse = parse_elastic_job if kind == ELASTIC_JOBS else parse_teacher_pool
        found = parse(manifest, _ANY_STORE, strict=True)
        problems = [problem.message for problem in found] if isinstance(found, tuple) else []
        if isinstance(found, ElasticJob) and (problem := find_scheme_problem(found.checkpoint)):
            problems.append(f"spec.checkpoint is {quote(found.checkpoint)}: {problem}")
        if words := [*find_slips(manifest), *problems]:
            raise SettingsError(f"{kind.kind} {manifest['metadata']['name']!r}: {'; '.join(words)}")


def create_all(
    client: KubeClient, manifests: Sequence[Object], namespace: str, tell: Callable[[str], None]
) -> list[Object]:
    """Create resources in order, and return the API's responses. If one is refused, delete the earlier ones.

    A job's script is created before the job, which then becomes the script's owner. Raises ConflictError if a name
    exists already.
    """
    made: list[Object] = []
    try:
        for manifest in manifests:
            where = manifest["metadata"].get("namespace") or namespace
            made.append(_create(client, manifest, where))
            tell(f"{_words(manifest)} created in namespace {where}")
        _own_scripts(client, made)
    except KubernetesError as exc:
        doubtful = [_words(manifest) for manifest in manifests[len(made) : len(made) + 1]]
        there = [f"{words} may have been created" for words in doubtful] + [f"{_words(item)} exists" for item in made]
        raise KubernetesError(f"{exc}; {', '.join(there)}: `edl delete` removes jobs and pools") from exc
    except EDLError:
        for item in reversed(made):  # a job needs its script and pools until it is deleted
            metadata = item["metadata"]
            try:
                client.delete(manifest_type(item), metadata["name"], metadata["namespace"], uid=metadata["uid"])
            except EDLError as exc:  # the refusal is the error to raise
                tell(f"{_words(item)} could not be removed again, nor anything created before it: {exc}")
                break
            tell(f"{_words(item)} removed again")
        raise
    return made


def find_pools(client: KubeClient, demands: Sequence[RequestedPool]) -> dict[str, Object]:
    """Return the existing pools that provide a job's services, by name. For users, a pool's name works too."""
    wanted = [demand.service for demand in demands if demand.serve is None]
    there = [(decode_workload("pool", item), item) for item in client.list(TEACHER_POOLS).items] if wanted else []
    pools: dict[str, Object] = {}
    for name in wanted:
        found = [(pool, item) for pool, item in there if pool.job_id == name]  # its service
        if not (found := found or [(pool, item) for pool, item in there if pool.name == name]):
            raise SettingsError(
                f"--teachers {name}: no pool in namespace {client.namespace!r} provides this service"
                f"{did_you_mean(name, (pool.job_id for pool, _ in there))}; to create a pool, pass --teachers "
                f"{name}=0:4 --serve '{name}=--torch-factory …' (arguments of `edl serve`)"
            )
        pools |= {pool.name: item for pool, item in found}
    return pools


def _create(client: KubeClient, manifest: Object, namespace: str) -> Object:
    kind = manifest_type(manifest)
    name = manifest["metadata"]["name"]
    try:
        try:
            return client.create(kind, manifest, namespace)
        except ConflictError:
            if kind != CONFIG_MAPS or not _delete_orphan(client, manifest, namespace):
                raise
            return client.create(kind, manifest, namespace)
    except ConflictError as exc:
        remedy = {
            ELASTIC_JOBS: f"choose another --name, or `edl delete job/{name} --wait` first",
            TEACHER_POOLS: f"omit --serve to use it as it is, or `edl delete pool/{name} --wait` first",
        }.get(kind, "a job or another program owns it: choose another --name, or `edl delete JOB --wait` first")
        raise ConflictError(f"{_words(manifest)} already exists in namespace {namespace}: {remedy}") from exc
    except InvalidObjectError as exc:
        raise InvalidObjectError(f"{_words(manifest)}: {exc}") from exc


def _delete_orphan(client: KubeClient, manifest: Object, namespace: str) -> bool:
    """Delete a script whose job is gone: a killed submission left it behind, or its garbage collection is pending."""
    name, job = manifest["metadata"]["name"], (manifest["metadata"].get("labels") or {}).get(SCRIPT_LABEL)
    found = client.get(CONFIG_MAPS, name, namespace)
    metadata = found["metadata"] if found is not None else {}
    if not job or (metadata.get("labels") or {}).get(SCRIPT_LABEL) != job:
        return False
    owners = metadata.get("ownerReferences") or []
    if any((owner["kind"], owner["name"]) != (ELASTIC_JOBS.kind, job) for owner in owners):
        return False
    if client.get(ELASTIC_JOBS, job, namespace) is not None:
        return False
    return client.delete(CONFIG_MAPS, name, namespace, uid=metadata["uid"])


def _own_scripts(client: KubeClient, made: Sequence[Object]) -> None:
    """Make the job the owner of its script, so that deleting the job also deletes the script."""
    jobs = {item["metadata"]["name"]: item for item in made if manifest_type(item) == ELASTIC_JOBS}
    for item in made:
        metadata: dict[str, Any] = item["metadata"]
        job = jobs.get((metadata.get("labels") or {}).get(SCRIPT_LABEL))
        if manifest_type(item) == CONFIG_MAPS and job is not None:
            owner = {
                "apiVersion": ELASTIC_JOBS.api_version,
                "kind": ELASTIC_JOBS.kind,
                "name": job["metadata"]["name"],
                "uid": job["metadata"]["uid"],
            }
            patch = {"metadata": {"ownerReferences": [owner]}}
            client.patch(CONFIG_MAPS, metadata["name"], patch, metadata["namespace"])


def _words(manifest: Object) -> str:
    names = {ELASTIC_JOBS: "job", TEACHER_POOLS: "pool", CONFIG_MAPS: "configmap"}
    return f"{names[manifest_type(manifest)]}/{manifest['metadata']['name']}"
