"""`edl run`: torchrun's command line, for EDL's agent.

torchrun's own parser parses the options, so a command that works with torchrun has the same meaning here. Options that
choose or tune torchrun's rendezvous are accepted, but not needed.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, Std
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

from edl.background import start_call
from edl.collective.agent.agent import Agent
from edl.collective.agent.command_line.endpoint import RendezvousEndpoint, own_address, warn_of_slow_name
from edl.collective.agent.command_line.options import parse_options, parser
from edl.collective.agent.command_line.slurm import SlurmStep, TaskRuns
from edl.collective.agent.ending import ExitCode, TerminationMessage, write_termination_message
from edl.collective.agent.health.hangs import HangLimits
from edl.collective.agent.health.node_check import NodeCheckSettings
from edl.collective.agent.launch_spec import LaunchSpec, has_gpu_build
from edl.collective.agent.processes.zygote import ProgramSpec
from edl.collective.agent.rendezvous import RendezvousSettings
from edl.collective.checkpoint.storage.folder import absolute_url
from edl.discovery import Store, open_store
from edl.errors import DiscoveryError, EDLError, SettingsError
from edl.log_output import plain_log_to_stderr
from edl.settings import Credentials, default_discovery_url, read

if TYPE_CHECKING:
    from edl.protocol.tls import PeerTLS

logger = logging.getLogger(__name__)


@contextmanager
def kept_log_folder() -> Iterator[str]:
    """Make a folder for the workers' files; the folder is kept unless it stays empty."""
    folder = tempfile.mkdtemp(prefix="edl-output-")
    try:
        yield folder
    finally:
        with suppress(OSError):  # it is not empty
            Path(folder).rmdir()


_LOGGERS = ("edl.collective.agent", "edl.collective.replica")  # shown from INFO on; all others from WARNING on

_STORE_TIMEOUT_S = 2.0  # for a request to the store; longer than the lease, after which others continue anyway
_EXIT_USAGE = 2  # the exit code of `edl.cli`, which turns errors raised here into exit codes
_SERVED = "edl://"
_NO_NAME = "none"  # torchrun's own `--rdzv-id` if none is given
_OWN_NAME = re.compile("run-[0-9a-f]{32}")  # jobs of one node, without a name from the user: no other node may join
_BEGIN_S = 30.0  # for a fork to reach the script's first line: milliseconds, or seconds on a machine that swaps
_UNUSED = ("rdzv_backend", "rdzv_endpoint", "node_rank", "master_addr", "master_port", "start_method")
_UNUSED_ANYWHERE = ("node_rank", "start_method")


def main(argv: Sequence[str]) -> int:
    try:
        return _run_agent(argv)
    except EDLError as exc:
        codes = {DiscoveryError: ExitCode.TRY_AGAIN, SettingsError: _EXIT_USAGE}
        code = next((int(code) for kind, code in codes.items() if isinstance(exc, kind)), int(ExitCode.FAILED))
        write_termination_message(_termination_log(), TerminationMessage(exit_code=code, message=str(exc)))
        raise


def _termination_log() -> str:
    return read("EDL_TERMINATION_LOG", str) or ""


def _run_agent(argv: Sequence[str]) -> int:
    step = SlurmStep.of()
    options = parse_options(argv, step)
    _check_temporary_folder()
    with ExitStack() as stack:
        stack.enter_context(plain_log_to_stderr("edl run", _LOGGERS, options.log_format))
        runs: TaskRuns | None = None
        if step is not None and options.rdzv_id == step.name:
            runs = stack.enter_context(TaskRuns(step, _command(options)))
            step = replace(step, run=runs.ended)
            options = parse_options(argv, step)
        conf = _conf(options)
        endpoint = RendezvousEndpoint.of(options, conf, _nodes(options.nnodes)[1])
        url = _store_url(options, stack) if endpoint is None else endpoint.url
        spec = replace(_launch(options, conf, url, stack), slurm=step is not None)
        store = stack.enter_context(_open_store(options, endpoint, url, spec))
        spec = replace(spec, addr=spec.addr or own_address(url))  # the URL is known to name a store now
        start_call("edl-own-name", partial(warn_of_slow_name, spec.addr))
        here_only = url.startswith("sqlite") or (endpoint is not None and endpoint.local)
        if spec.rendezvous.max_nodes > 1 and spec.addr.startswith("127.") and not here_only:
            logger.warning(
                "other nodes will connect to this node at %s; with several hosts, pass --local-addr on each", spec.addr
            )
        if step is not None and step.rank == 0:
            nodes = f"--nnodes {options.nnodes} --nproc-per-node {spec.workers}"
            logger.info(
                "%s: --rdzv-id %s %s, store %s",
                *(step.describe(), spec.job, nodes, url),
                extra={"job": spec.job, "store": url},
            )
        _log_unused_options(options, endpoint, url)
        code = Agent(spec, store).run()
        if runs is not None and code in (ExitCode.DONE, ExitCode.NOT_STORED):
            runs.count(stored=code == ExitCode.DONE)
        if url.startswith(_SERVED):
            from edl.collective.agent.command_line.served_store import keep_for_later

            keep_for_later(store, spec.job, code == ExitCode.NOT_STORED)
        return code


def _check_temporary_folder() -> None:
    try:
        tempfile.gettempdir()
    except FileNotFoundError as exc:
        raise SettingsError(
            "no folder for temporary files is writable, but workers need one: set TMPDIR or, if a container's root "
            "file system is read-only, mount a folder at /tmp (in Kubernetes an emptyDir)"
        ) from exc


def _open_store(
    options: argparse.Namespace, endpoint: RendezvousEndpoint | None, url: str, spec: LaunchSpec
) -> AbstractContextManager[Store]:
    credentials = Credentials.of(
        ca=options.tls_ca, cert=options.tls_cert, key=options.tls_key, server_name=options.tls_server_name
    )
    if endpoint is None:
        return open_store(url, timeout_s=_STORE_TIMEOUT_S, credentials=credentials)
    from edl.collective.agent.command_line.served_store import served_store  # gRPC: others need not wait for its import

    return served_store(endpoint, credentials, timeout_s=_STORE_TIMEOUT_S, join_timeout_s=spec.join_timeout_s)


def _log_unused_options(options: argparse.Namespace, endpoint: RendezvousEndpoint | None, url: str) -> None:
    default = parser().get_default
    unused = [name for name in _UNUSED if getattr(options, name, None) != default(name)]
    if endpoint is not None or url == options.rdzv_endpoint:
        unused = [name for name in unused if name in _UNUSED_ANYWHERE]
    if unused:
        flags = ", ".join("--" + name.replace("_", "-") for name in unused)
        where = f"{url}, which is on this machine only" if url.startswith("sqlite:") else url
        logger.warning("%s: not used here; nodes meet in the store, %s (--store URL)", flags, where)


def _conf(options: argparse.Namespace) -> dict[str, str]:
    try:
        return _parse_rendezvous_config(options.rdzv_conf)
    except ValueError as exc:
        raise SettingsError(f"--rdzv-conf {options.rdzv_conf}: expected NAME=VALUE,NAME=VALUE") from exc


def _launch(options: argparse.Namespace, conf: dict[str, str], url: str, stack: ExitStack) -> LaunchSpec:
    minimum, maximum = _nodes(options.nnodes)
    try:
        workers = torchrun.determine_local_world_size(options.nproc_per_node)
    except ValueError as exc:
        raise SettingsError(f"--nproc-per-node {options.nproc_per_node}: {exc}") from exc
    if workers < 1:
        raise SettingsError(f"--nproc-per-node {workers}: expected at least 1 worker")
    job = _job(options, maximum, served=url.startswith(_SERVED))
    last_call = _number(conf, "last_call_timeout", 1.0 if minimum < maximum else 0.0)
    if workers > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, before the workers import torch
    # A starting worker touches all of its memory for the first time; huge pages cut that to a third of the time.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    return LaunchSpec(
        job=job,
        program=_program(options),
        workers=workers,
        rendezvous=RendezvousSettings(
            minimum, maximum, last_call_s=last_call, takeover_s=_number(conf, "takeover_timeout", 10.0)
        ),
        addr=options.local_addr or "",
        store=url,
        ttl_s=options.lease_ttl,
        join_timeout_s=_number(conf, "join_timeout", 600.0),
        max_restarts=options.max_restarts,
        checkpoint=absolute_url(options.checkpoint or read("EDL_CHECKPOINT", str) or ""),
        checkpoint_interval_s=options.checkpoint_interval,
        grace_s=options.grace_period,
        role=options.role,
        hang=HangLimits(floor_s=options.hang_after, begin_s=min(_BEGIN_S, options.hang_after)),
        readmit=options.readmit,
        check=NodeCheckSettings(timeout_s=options.node_check_timeout) if options.node_check else None,
        logs=_logs(options, stack),
        framework=options.framework,
        resumable=not options.standalone and (options.rdzv_id != _NO_NAME or url.startswith(_SERVED)),
        command=_command(options) if job == _NO_NAME else "",
        environ={"TORCHELASTIC_SIGNALS_TO_HANDLE": options.signals_to_handle},
        tls=_tls(options),
        leave_on_oom=options.leave_on_oom,
        termination_log=_termination_log(),
    )


def _tls(options: argparse.Namespace) -> PeerTLS | None:
    """Return the agents' TLS settings from the options, or from an environment with a CA and a certificate, or None."""
    given = {"ca": options.tls_ca, "cert": options.tls_cert, "key": options.tls_key}
    credentials = Credentials.of(**given, server_name=options.tls_server_name)
    if any((*given.values(), options.tls_server_name)) or (credentials.ca and credentials.cert):
        from edl.protocol.tls import PeerTLS  # imported only here, since it is not needed otherwise

        return PeerTLS(credentials)
    return None  # a CA alone is for the script's own teachers


def _store_url(options: argparse.Namespace, stack: ExitStack) -> str:
    if options.standalone:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="edl-run-"))
        return f"sqlite:///{folder}/store.sqlite"
    if not options.store and "://" in options.rdzv_endpoint:  # as in torchrun with --rdzv-backend edl
        return str(options.rdzv_endpoint)
    named = options.store or read("EDL_DISCOVERY", str)
    return named or default_discovery_url()


def _job(options: argparse.Namespace, max_nodes: int, *, served: bool) -> str:
    """Return the job's name. As with torchrun, a single node needs none, nor do nodes that share an endpoint."""
    name = str(options.rdzv_id)
    if name != _NO_NAME and not options.standalone:
        if not name or "/" in name or name in (".", "..") or not name.isprintable():
            raise SettingsError(f"--rdzv-id {name!r}: expected a printable name without slashes")
        if _OWN_NAME.fullmatch(name):
            raise SettingsError(f"--rdzv-id {name}: this name belongs to a single-node job; no other node can join")
        return name
    if served:
        return name
    if max_nodes > 1 and not options.standalone:
        raise SettingsError(
            "several nodes need --rdzv-id NAME (any name, the same on each node), or --rdzv-endpoint HOST:PORT (the "
            "address of one node, which then serves the store)"
        )
    return f"run-{uuid.uuid4().hex}"


def _command(options: argparse.Namespace) -> str:
    """Return a digest of the script and its arguments. It does not depend on how the script's path is written.

    A program's first argument that is not an option counts as a script in the working folder (`bash train.sh`).
    """
    target, arguments = options.training_script, list(options.training_script_args)
    if options.no_python:
        found = str(Path.cwd() / (shutil.which(target) or target))  # links stay: a busybox is many programs
        scripts = [at for at, argument in enumerate(arguments) if not argument.startswith("-")]
        for at in scripts[:1]:
            arguments[at] = os.path.realpath(arguments[at])
        words = [found, *arguments]
    elif options.module:
        words = [str(Path.cwd()), target, *arguments]
    else:
        words = [str(Path(target).resolve()), *arguments]
    return hashlib.sha256("\0".join(words).encode(errors="surrogateescape")).hexdigest()[:16]


def _program(options: argparse.Namespace) -> ProgramSpec:
    target, arguments = options.training_script, tuple(options.training_script_args)
    # Paddle's GPU build initializes GPUs when it is imported, which no fork survives.
    preload = tuple(name.strip() for name in options.preload.split(",") if name.strip())
    if wrong := [name for name in preload if not all(part.isidentifier() for part in name.split("."))]:
        raise SettingsError(f"--preload {wrong[0]}: expected names of modules, such as transformers,torchvision")
    prewarm = not options.no_prewarm and not (options.framework == "paddle" and has_gpu_build())
    if options.no_python and options.module:
        raise SettingsError("--no-python and --module are mutually exclusive")
    if options.no_python and shutil.which(target) is None:
        raise SettingsError(f"there is no program {target!r} on the PATH")
    if options.no_python:
        return ProgramSpec("program", target, arguments)
    if not options.module and not Path(target).is_file() and not Path(target, "__main__.py").is_file():
        raise SettingsError(f"there is no script {target!r} in {Path.cwd()}")
    interpreter = read("PYTHON_EXEC", str)  # torchrun's variable
    if interpreter is not None and interpreter != sys.executable:
        if shutil.which(interpreter) is None:
            raise SettingsError(f"PYTHON_EXEC={interpreter!r}: there is no such program")
        return ProgramSpec("program", interpreter, ("-u", *(["-m"] if options.module else []), target, *arguments))
    if options.module:
        return ProgramSpec("module", target, arguments, prewarm, options.framework, preload)
    return ProgramSpec("script", target, arguments, prewarm, options.framework, preload)


def _logs(options: argparse.Namespace, stack: ExitStack) -> Callable[[str], LogsSpecs]:
    """Return a function that takes a folder for the workers' files, but uses the options' folder if there is one."""
    try:
        wanted = options.local_ranks_filter
        ranks = {int(rank) for rank in wanted.split(",")} if wanted else None
        redirects, tee = Std.from_str(options.redirects), Std.from_str(options.tee)
    except ValueError as exc:
        raise SettingsError(f"invalid --redirects, --tee or --local-ranks-filter: {exc}") from exc
    folder = options.log_dir
    if not folder and (_any(redirects) or _any(tee)):
        folder = stack.enter_context(kept_log_folder())
        logger.info("the workers' output is kept in %s (--log-dir FOLDER)", folder)
    make = partial(DefaultLogsSpecs, redirects=redirects, tee=tee, local_ranks_filter=ranks)
    if not folder:
        return make
    try:
        logs = make(folder)
    except OSError as exc:
        raise SettingsError(f"--log-dir {folder}: {exc.strerror or exc}") from exc
    return lambda _: logs


def _any(streams: Std | dict[int, Std]) -> bool:
    return any(stream != Std.NONE for stream in (streams.values() if isinstance(streams, dict) else [streams]))


def _nodes(text: str) -> tuple[int, int]:
    try:
        minimum, maximum = torchrun.parse_min_max_nnodes(text)
    except (ValueError, RuntimeError) as exc:
        raise SettingsError(f"--nnodes {text}: expected MIN:MAX or one number, such as 1:4 or 2") from exc
    if not 0 < minimum <= maximum:
        raise SettingsError(f"--nnodes {text}: expected 0 < MIN <= MAX")
    return minimum, maximum


def _number(conf: dict[str, str], name: str, default: float) -> float:
    try:
        value = float(conf.get(name, default))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise SettingsError(f"--rdzv-conf {name}={conf[name]}: expected seconds, such as 30")
    return value
