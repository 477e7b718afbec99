"""Commands that serve in the foreground until a signal: `edl store`, `edl dashboard`, `edl proxy` and `edl operator`.

Each command parses its options, starts one of the library's servers, and waits. A server's packages are imported when
it starts, so that `--help` does not wait for aiohttp or gRPC.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from edl import mounts
from edl.cli.kube.workloads import add_kubeconfig_options
from edl.cli.output import printable
from edl.command_line import CommandParser, at_least, duration, port
from edl.end_signals import collect_signals
from edl.errors import DiscoveryError, SettingsError
from edl.kube.settings import KubeSettings
from edl.log_output import log_to_stderr
from edl.settings import Credentials, DiscoverySettings

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.2
"""Poll interval for a signal or a failure."""
_BY_SIGNAL: Final = 128
"""Base of the exit code: as in a shell, this number plus the signal's number."""
_STORE_PORT: Final = 29400
_PAGE_PORT: Final = 8650
"""Default ports, the same as in `edl.discovery.served.store` and `edl.dashboard.server`, which are slow to import."""


def _wait(caught: Sequence[int], check: Callable[[], None] = lambda: None) -> int:
    """Wait for a signal; return its number. `check` is called repeatedly, and raises the server's error."""
    while not caught:
        check()
        time.sleep(_POLL_S)
    return caught[0]


def _server_credentials(options: object, *, environ: bool) -> Credentials:
    """Return the options' credentials, plus the environment's if `environ` (otherwise those are for teachers)."""
    names = ("tls_ca", "tls_cert", "tls_key", "token_file", "allow_insecure_tokens")
    given = {name.removeprefix("tls_"): getattr(options, name) for name in names}
    return Credentials.of(**given, environ=None if environ else {})


# --- edl store ---

_STORE = """\
Serves a store for teachers, students and jobs on any number of hosts, and runs in the foreground until SIGTERM or
Ctrl-C. Everything is in one SQLite file. A server restarted with its file continues where it stopped; an empty file
is refilled within seconds as teachers and jobs register again. A second server on the same file is refused. In
Kubernetes, the Helm chart runs this command (docs/kubernetes-operators.md)."""

_STORE_EXAMPLES = """\
examples:
  edl store --file /var/lib/edl/store.sqlite
      on port 29400 of all addresses; clients: EDL_DISCOVERY=edl://HOST:29400, or --store edl://HOST:29400
  edl store --file store.sqlite --tls-ca ca.pem --tls-cert cert.pem --tls-key key.pem
      clients need a certificate from that CA (set EDL_TLS_CA, EDL_TLS_CERT and EDL_TLS_KEY for them)"""

_MOST_NBYTES: Final = 256 << 20
"""Maximum total size of all values, in a file on disk. An agent's store is in memory and allows less."""


def store(argv: Sequence[str]) -> int:
    """Run `edl store`."""
    parser = CommandParser("edl store", _STORE, _STORE_EXAMPLES)
    add = parser.add_argument
    add("--file", required=True, metavar="PATH", help="SQLite file with all data; created if missing")
    add("--host", default="::", help="IP address to listen on (default: ::, all addresses of this host)")
    add("--port", type=port, default=_STORE_PORT, help=f"port to listen on; 0 for any (default: {_STORE_PORT})")
    parser.add_credentials("server", "processes", " (defaults: EDL_TLS_CA, EDL_TLS_CERT, EDL_TLS_KEY, EDL_TOKEN_FILE)")
    parser.add_log_options()
    options = parser.parse_args(argv)
    log_to_stderr("edl store", verbose=options.verbose, log_format=options.log_format)
    given = _server_credentials(options, environ=True)
    if (options.tls_ca or options.tls_cert) and not (given.ca and given.cert):
        raise SettingsError("a store uses mutual TLS or none: set --tls-ca, --tls-cert and --tls-key")
    if "://" in options.file:
        meant = unquote(urlsplit(options.file).path) if options.file.startswith("sqlite:///") else ""
        hint = f"did you mean /{meant.lstrip('/')}?" if meant else "the file's path is expected, such as store.sqlite"
        raise SettingsError(f"--file {options.file}: this is a URL; {hint}")

    from edl.dashboard.state.history import StoreSampler
    from edl.discovery.served.addresses import ListenAddress, is_loopback
    from edl.discovery.served.server import StoreLimits, StoreServer
    from edl.discovery.served.store import store_credentials
    from edl.protocol.tls import CredentialFiles

    credentials = store_credentials(given)
    files = CredentialFiles(credentials, serving=True) if credentials else None
    path = Path(options.file).absolute()
    with collect_signals() as caught, _alone(path):
        address = ListenAddress(options.host, options.port)
        server = StoreServer(str(path), address, files, StoreLimits(nbytes=_MOST_NBYTES), StoreSampler())

        def check() -> None:
            if server.failed:
                raise DiscoveryError("the server ended; see the log above")

        try:
            logger.info("serving the store in %s on port %d", options.file, server.port, extra={"port": server.port})
            if not credentials and not is_loopback(options.host):
                logger.warning(
                    "the store listens on %s without TLS or tokens: anyone who reaches it can change jobs and register"
                    " teachers (--tls-ca, --tls-cert and --tls-key: docs/security.md)",
                    options.host,
                )
            number = _wait(caught, check)
        finally:
            server.close()
        logger.info("stopped by %s", signal.Signals(number).name)
        return _BY_SIGNAL + number


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Refuse to serve a file that another `edl store` serves: clients of one server would miss the other's changes.

    There are two locks, which the kernel releases when the process ends. The first lock is on a separate file beside
    the store's file. That file is never deleted, so the lock remains if the store's file is replaced. The second lock
    is on the store's file itself, in case this file has hard links or the lock file was removed. Other commands can
    still open the store's file (`sqlite://`), because SQLite uses a different kind of lock (`fcntl`). On NFS, both
    kinds of lock are the same: the second lock would block SQLite, and is therefore not taken.
    """
    file = Path(os.path.realpath(path))
    note = Path(f"{file}.lock")
    from edl.discovery import open_store
    from edl.discovery.served.host import FileLock

    with ExitStack() as held:

        def hold(place: Path) -> None:
            try:
                lock = FileLock(place)
            except OSError as exc:
                raise SettingsError(f"--file {path}: {place} cannot be opened: {exc.strerror}") from exc
            held.callback(lock.close)
            if not lock.take(fcntl.LOCK_EX):
                holder = note.read_text(errors="replace").strip() or "another process"
                raise SettingsError(f"--file {path} is already served by {holder}: stop that one, or name another file")

        try:
            note.parent.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise SettingsError(f"--file {path}: {note.parent} cannot be created: {exc.strerror}") from exc
        hold(note)
        if not mounts.is_shared(mounts.file_system(str(file), mounts.read_mounts())):
            open_store(f"sqlite://{quote(str(file))}").close()  # creates it, with its journal
            hold(file)
        note.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        yield


# --- edl dashboard ---

_DASHBOARD = """\
Serves a page with everything that a store knows: jobs with their members, goodput and throughput over time, teachers
and their students, how many teachers are wanted and why, the shards of masters, and what happened and why. The page
is read-only. While it is open, the server reads the store once a second for all browsers."""

_DASHBOARD_EXAMPLES = """\
examples:
  edl dashboard --open                      the default store (your SQLite file), opened in the browser
  edl dashboard --store consul://10.0.0.7:8500
  edl dashboard --kube research             with the jobs and pools of that namespace of the kubeconfig's cluster
  ssh -L 8650:localhost:8650 HOST           then http://localhost:8650 shows the page that runs on HOST
  edl dashboard --host 0.0.0.0 --token-file tokens --tls-cert cert.pem --tls-key key.pem
                                            for others too, with a token file that only you can read:
                                            (umask 077; openssl rand -hex 32 > tokens)
  curl -s localhost:8650/api/state | jq .   what the page shows, for programs

The server listens on 127.0.0.1, which only this machine can reach. With another --host, anyone who reaches the port
sees the page unless --token-file is given. /metrics is for Prometheus, /healthz for probes; docs/dashboard.md has a
Grafana dashboard and explains each metric."""

_KUBE_TIMEOUT_S = 3.0
"""Timeout of API requests: reads of the store wait for these requests."""


def dashboard(argv: Sequence[str]) -> int:
    """Run `edl dashboard`."""
    parser = CommandParser("edl dashboard", _DASHBOARD, _DASHBOARD_EXAMPLES)
    add = parser.add_argument
    add("--job", metavar="JOB", help="show only this job")
    parser.add_store_option()
    add("--teacher-store", metavar="URL", help="where teachers register, if not in --store")
    add(
        "--kube",
        action="append",
        nargs="?",
        const="",
        default=[],
        metavar="NAMESPACE",
        help="also show jobs and pools in a Kubernetes cluster: in this namespace, or the context's (in a pod, the "
        "pod's); repeatable",
    )
    add_kubeconfig_options(add)
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    add("--port", type=port, default=_PAGE_PORT, help=f"0 for a free port (default: {_PAGE_PORT})")
    add("--open", action="store_true", help="open the page in the browser")
    _add_allowed_hosts(parser)
    parser.add_credentials("server", "browsers")
    options = parser.parse_args(argv)
    url = DiscoverySettings.of(options.store).url

    from edl.dashboard.server import DashboardServer, DashboardSettings
    from edl.dashboard.state.reader import shown_url

    kube = None
    if options.kube or options.context or options.kubeconfig:
        kube = KubeSettings(options.kubeconfig, options.context, timeout_s=_KUBE_TIMEOUT_S)
    settings = DashboardSettings(
        store=url,
        registry=options.teacher_store,
        host=options.host,
        port=options.port,
        job=options.job,
        allowed_hosts=tuple(options.allow_host),
        credentials=_server_credentials(options, environ=False),
        kube=kube,
        kube_namespaces=tuple(options.kube),
    )
    with collect_signals() as caught, DashboardServer(settings) as server:
        print(printable(f"The page of {shown_url(url)} is at {server.url} ; Ctrl-C ends it."), flush=True)
        if options.open and not webbrowser.open(server.url):
            print("could not start a browser: open that address in one")
        _wait(caught)
    return 0


def _add_allowed_hosts(parser: CommandParser) -> None:
    parser.add_advanced_group("names of this server").add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="also answer requests to this name. Without tokens, only requests to IP addresses, localhost and this "
        "machine's name are answered, to prevent DNS rebinding; repeatable",
    )


# --- edl proxy ---

_PROXY = """\
Acts like a vLLM server that returns prompt log-probabilities, backed by all live teachers of one or more services:
language models from `edl serve --hf` and `edl register vllm://`. Trainers that accept only one teacher URL (TRL,
Axolotl, ms-swift, ...) can then use teachers that come, go and die. The proxy generates no text."""

_PROXY_EXAMPLES = """\
examples:
  edl proxy qwen --port 9000                        then teacher_model_server_url="http://localhost:9000" in TRL
  edl proxy qwen --store consul://10.0.0.7:8500 --tokenizer ./student
  edl proxy math code=qwen-coder                    teacher_server_urls={"math": "http://localhost:9000/math", ...}
  edl proxy 10.0.0.9:8001,10.0.0.10:8001 --model qwen       teachers without a store
  edl proxy qwen --host 0.0.0.0 --token-file tokens --tls-cert cert.pem --tls-key key.pem
  curl -s localhost:9000/v1/completions -H 'Content-Type: application/json' \\
       -d '{"prompt": [[3, 1, 4, 1, 5]], "max_tokens": 1, "prompt_logprobs": 5}'"""

_PROXY_DETAILS = """\
POST /v1/completions takes prompts as token ids with prompt_logprobs up to --top-k, and max_tokens 0 or 1. Teachers of
`edl serve --hf` accept any temperature; engines accept only 1 (0 means 1). With several services, "model" or the URL
(/NAME/v1/completions) chooses one. /health returns 200 while every service has a live teacher (/NAME/health: that
service), /livez while this process runs; /metrics is for Prometheus. While no teacher is live, a request waits for
--teacher-timeout, then gets a 503.

Start one proxy for each trainer, or one for all. On SIGTERM it refuses new requests and answers pending ones (--drain).
Exit codes: 0 ended, 1 some requests were not answered in time, 2 wrong usage."""

_EXIT_CUT = 1  # not everything was answered in time, as in `edl serve`


def proxy(argv: Sequence[str]) -> int:
    """Run `edl proxy`."""
    parser = CommandParser("edl proxy", _PROXY, _PROXY_EXAMPLES, _PROXY_DETAILS)
    add = parser.add_argument
    named = "the teachers' service, or host:port of teachers, separated by commas; NAME is the name that clients use"
    add("services", nargs="+", metavar="[NAME=]SERVICE", help=named)
    parser.add_store_option("where teachers register")
    add("--model", metavar="NAME", default="", help="the same as NAME=, for one service")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    add("--port", type=port, default=9000, help="0 for a free port (default: 9000)")
    add("--top-k", type=int, default=128, metavar="K", help="largest prompt_logprobs of a request (default: 128)")
    add("--timeout", type=duration(), default=600.0, metavar="TIME", help="response timeout (default: 10m)")
    wait = "how long a request waits while no teacher is live (default: 60s)"
    add("--teacher-timeout", type=duration(), default=60.0, metavar="TIME", help=wait)
    add("--drain", type=duration(), default=30.0, metavar="TIME", help="time to finish after SIGTERM (default: 30s)")
    add("--model-version", "--version", metavar="V", default="", help="use only teachers of this model version")
    add("--tokenizer", metavar="PATH", default="", help="student's tokenizer; refuse teachers with a different one")
    most = "maximum tokens in flight, in total and per request; further requests wait (default: by labels, 256 MiB)"
    add("--max-tokens", type=int, metavar="N", help=most)
    _add_allowed_hosts(parser)
    note = ". Credentials for teachers: environment (EDL_TLS_CA, EDL_TOKEN_FILE, ...)"
    parser.add_credentials("server", "clients", note)
    parser.add_log_options()
    options = parser.parse_args(argv)
    log_to_stderr("edl proxy", verbose=options.verbose, log_format=options.log_format)

    from edl.proxy.server import ProxyServer
    from edl.proxy.settings import ProxySettings

    settings = ProxySettings(
        services=_services_by_name(options.services, options.model),
        discovery=options.store,
        host=options.host,
        port=options.port,
        top_k=options.top_k,
        max_tokens=options.max_tokens,
        timeout_s=options.timeout,
        teacher_timeout_s=options.teacher_timeout,
        version=options.model_version,
        tokenizer=options.tokenizer,
        allowed_hosts=tuple(options.allow_host),
        credentials=_server_credentials(options, environ=False),
    )
    with collect_signals() as caught, ProxyServer(settings) as server:
        print(
            printable(f"Teachers of {', '.join(settings.services)} answer at {server.url} ; Ctrl-C ends it."),
            flush=True,
        )
        _wait(caught)
        logger.info("refusing new requests; pending requests have %g s", options.drain)
        return 0 if server.drain(options.drain) else _EXIT_CUT


def _services_by_name(given: Sequence[str], model: str) -> dict[str, str]:
    if model:
        if len(given) > 1 or "=" in given[0]:
            raise SettingsError(f"--model {model!r} applies to one SERVICE: write NAME=SERVICE for each instead")
        return {model: given[0]}
    found = {}
    for text in given:
        name, _, service = text.rpartition("=")
        if not service or (name or service) in found or text.startswith("="):
            raise SettingsError(f"service {text!r}: expected SERVICE or NAME=SERVICE, each name once")
        found[name or service] = service
    return found


# --- edl operator ---

_OPERATOR = """\
Manages the ElasticJobs and TeacherPools in a cluster: creates their pods, replaces those that end, uses idle
GPUs, and releases them. It finds the cluster as kubectl does, or by the service account of the pod that it runs in.
Normally, the chart (serving/kube/chart) starts the operator; on your own machine, it works with your permissions.

All its state is in the resources' status. You can kill the operator at any moment: pods keep running, and the next
operator continues from there. A second operator does no harm. It waits while the API server is down.

The operator needs the CRDs, and the Role edl-operator in each namespace (docs/kubernetes-operators.md). With the
ClusterRole edl-capacity, it sees which resources are idle before it starts a pod; otherwise, it learns this from
pending pods.

SIGTERM ends the operator with exit code 143, Ctrl-C with 130. With --http-port, it serves /livez, /readyz and
/metrics."""

_OPERATOR_EXAMPLES = """\
examples:
  edl operator --store consul://consul:8500
      the namespace of the kubeconfig's context; resources that name no store use this one
  edl operator --namespace team-a --namespace team-b --http-host :: --http-port 8652
      two namespaces, with probes and metrics on all interfaces
  edl operator --all-namespaces
      the whole cluster, if the operator's account may read all pods"""


def operator(argv: Sequence[str]) -> int:
    """Run `edl operator`."""
    parser = CommandParser("edl operator", _OPERATOR, _OPERATOR_EXAMPLES)
    add = parser.add_argument
    namespace = "namespace to manage; repeatable (default: the context's, or the pod's own)"
    add("-n", "--namespace", action="append", default=[], metavar="NAME", help=namespace)
    add("-A", "--all-namespaces", action="store_true", help="manage all namespaces")
    url = "default store for resources: edl://host:port, consul://host:port or etcd://host:port"
    add("--store", "--discovery", dest="store", metavar="URL", default="", help=url)
    allowed = (
        "another store that the operator may read with its own credentials: SCHEME://HOST:PORT, SCHEME://HOST or "
        "SCHEME://; repeatable"
    )
    add("--allow-store", action="append", default=[], metavar="PREFIX", help=allowed)
    security = (
        "Pod Security level that limits what job and pool templates may request (default: baseline; privileged allows "
        "everything, such as hostPath and hostNetwork)"
    )
    add("--pod-security", choices=("baseline", "privileged"), default="baseline", help=security)
    accounts = "a service account that templates may name; repeatable (default: none)"
    add("--allow-service-account", action="append", default=[], metavar="[NAMESPACE/]NAME", help=accounts)
    add("--workers", type=at_least(1), default=4, metavar="N", help="resources handled at once (default: 4)")
    resync = "look at each resource this often even if nothing happens; less often if there are hundreds (default: 10m)"
    add("--resync", type=duration(), default=600.0, metavar="TIME", help=resync)
    add("--no-capacity", action="store_true", help="do not watch the cluster's nodes and pods, even if that is allowed")
    add_kubeconfig_options(add)
    add("--timeout", type=duration(), default=10.0, metavar="TIME", help="timeout of API requests (default: 10s)")
    add("--http-port", type=port, metavar="N", help="port of /livez, /readyz and /metrics; 0 for a free port")
    add("--http-host", default="127.0.0.1", metavar="HOST", help="address for --http-port (default: 127.0.0.1)")
    parser.add_log_options()
    options = parser.parse_args(argv)
    log_to_stderr("edl operator", verbose=options.verbose, log_format=options.log_format)
    if options.all_namespaces and options.namespace:
        raise SettingsError("--all-namespaces and --namespace cannot be combined")
    if "" in options.namespace:
        raise SettingsError("--namespace '': expected a name")

    from edl.master.kube.members.pod_policy import PodPolicy
    from edl.master.kube.operator import ALL_NAMESPACES, Operator, OperatorSettings

    settings = OperatorSettings(
        kube=KubeSettings(options.kubeconfig, options.context, timeout_s=options.timeout),
        namespaces=(ALL_NAMESPACES,) if options.all_namespaces else tuple(dict.fromkeys(options.namespace)),
        store=options.store,
        allow_stores=tuple(options.allow_store),
        pods=PodPolicy(options.pod_security, tuple(options.allow_service_account)),
        workers=options.workers,
        resync_s=options.resync,
        capacity=not options.no_capacity,
        host=options.http_host if options.http_port is not None else None,
        port=options.http_port or 0,
    )
    with collect_signals() as caught:
        with Operator(settings) as running:
            where = "all namespaces" if options.all_namespaces else ", ".join(running.namespaces)
            health = f"; health and metrics on port {running.port}" if running.port is not None else ""
            logger.info("working on %s%s", where, health)
            number = _wait(caught)
            logger.info("stopped by %s; pods keep running", signal.Signals(number).name)
        return _BY_SIGNAL + number
