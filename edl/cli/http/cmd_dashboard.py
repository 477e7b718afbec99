"""`edl dashboard`: a page in the browser with all jobs, teachers and shards of a store."""

from __future__ import annotations

import argparse
import time
import webbrowser
from collections.abc import Sequence

from edl.cli._changes import printable
from edl.cli._credentials import add_server_credentials
from edl.cli._option_values import Port
from edl.cli._store_option import add_store_option
from edl.dashboard.state.reader import shown_url
from edl.end_signals import collect_signals
from edl.kube.settings import KubeSettings
from edl.settings import Credentials, DiscoverySettings

__all__ = ["main"]

_PORT = 8650  # DEFAULT_PORT of edl.dashboard.server, which imports aiohttp
_KUBE_TIMEOUT_S = 3.0
"""For the API server: the look at the store waits for it."""
_POLL_S = 0.2  # how soon a signal is noticed

_DESCRIPTION = """\
Serves a page with everything that a store knows: jobs with their members, goodput and throughput over time, teachers
and who asks them, how many of them are wanted and why, the shards of masters, and what happened, with its cause.
It only reads; any number of browsers cost the store one look a second, and none where no page is open."""

_EXAMPLES = """\
examples:
  edl dashboard --open                      the default store (a SQLite file of yours), and the browser on it
  edl dashboard --store consul://10.0.0.7:8500
  edl dashboard --kube research             with the jobs and pools of that namespace of the kubeconfig's cluster
  ssh -L 8650:localhost:8650 HOST           then http://localhost:8650 shows the page that runs on HOST
  edl dashboard --host 0.0.0.0 --token-file tokens --tls-cert cert.pem --tls-key key.pem
                                            for others, too; a file of tokens that only you can read:
                                            (umask 077; openssl rand -hex 32 > tokens)
  curl -s localhost:8650/api/state | jq .   what the page shows, for programs

It listens on 127.0.0.1, which only this machine reaches. On another --host everybody who reaches the port sees the
page unless --token-file is given. /metrics is for Prometheus, /healthz for probes; docs/dashboard.md has a
dashboard for Grafana, and what each metric means."""


def main(argv: Sequence[str]) -> int:
    """Run `edl dashboard`."""
    options = _parser().parse_args(argv)
    credentials = Credentials.of(
        ca=options.tls_ca,
        cert=options.tls_cert,
        key=options.tls_key,
        token_file=options.token_file,
        allow_insecure_tokens=options.allow_insecure_tokens,
        environ={},  # the variables name what this machine's students show to teachers
    )
    url = DiscoverySettings.of(options.store).url
    from edl.dashboard.server import DashboardServer, DashboardSettings

    kube = None
    if options.kube or options.context or options.kubeconfig:
        kube = KubeSettings(options.kubeconfig, options.context, timeout_s=_KUBE_TIMEOUT_S)
    settings = DashboardSettings(
        store=url,
        registry=options.discovery,
        host=options.host,
        port=options.port,
        job=options.job,
        allowed_hosts=tuple(options.allow_host),
        credentials=credentials,
        kube=kube,
        kube_namespaces=tuple(options.kube),
    )
    with collect_signals() as caught, DashboardServer(settings) as server:
        print(printable(f"The page of {shown_url(url)} is at {server.url} ; Ctrl-C ends it."), flush=True)
        if options.open and not webbrowser.open(server.url):
            print("no browser could be started: open that address in one")
        while not caught:
            time.sleep(_POLL_S)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="edl dashboard",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--job", metavar="JOB", help="show only this job")
    add_store_option(parser)
    add("--discovery", metavar="URL", help="where teachers register, if not in --store")
    add(
        "--kube",
        action="append",
        nargs="?",
        const="",
        default=[],
        metavar="NAMESPACE",
        help="show the jobs and pools of a Kubernetes cluster, too: of this namespace, or of the context's (in a pod: "
        "of its own); with conditions, members and how they ended; may be repeated",
    )
    add("--context", metavar="NAME", default="", help="of the kubeconfig, for --kube")
    add("--kubeconfig", metavar="FILE", default="", help="for --kube (default: as kubectl has it)")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    add("--port", action=Port, default=_PORT, help=f"0 for a free port (default: {_PORT})")
    add("--open", action="store_true", help="open the page in the browser")
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="answer to this name in the browser's address, too; without tokens only addresses, localhost and this "
        "machine's name are answered, so that no other site can read the page (DNS rebinding); may be repeated",
    )
    add_server_credentials(parser, "browsers")
    return parser
