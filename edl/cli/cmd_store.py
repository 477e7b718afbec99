"""`edl store`: serves a store to other hosts, where teachers and jobs meet; no Consul or etcd is needed."""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from edl import mounts
from edl.cli._credentials import add_server_credentials
from edl.cli._option_values import Port
from edl.discovery import open_store
from edl.discovery.served.addresses import ListenAddress, is_loopback
from edl.discovery.served.host import FileLock
from edl.discovery.served.server import StoreLimits, StoreServer
from edl.discovery.served.store import DEFAULT_PORT, store_credentials
from edl.end_signals import collect_signals
from edl.errors import DiscoveryError, SettingsError
from edl.log_output import log_to_stderr
from edl.protocol.tls.credentials import CredentialFiles
from edl.protocol.tls.handshake import FailedHandshakes
from edl.settings import Credentials

__all__ = ["main"]

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.2
"""How soon a signal or a failure is noticed."""
_BY_SIGNAL: Final = 128
"""Exit code: as in a shell, this and the signal's number."""
_MOST_NBYTES: Final = 256 << 20
"""Largest size of all values together. They lie in a file on disk; an agent's store lies in memory and takes less."""

_DESCRIPTION = """\
Serves a store for teachers, students and jobs on any number of hosts, and runs in the foreground until SIGTERM or
Ctrl-C. Everything is in one SQLite file. A server that is started again with its file goes on where it stopped; one
that is started with an empty file is filled again within seconds, as teachers and jobs register again. A second server
of the same file is refused. In Kubernetes, the Helm chart runs this (docs/kubernetes-operators.md)."""

_EXAMPLES = """\
examples:
  edl store --file /var/lib/edl/store.sqlite
      at port 29400 of all addresses; elsewhere: EDL_DISCOVERY=edl://HOST:29400, or --store edl://HOST:29400
  edl store --file store.sqlite --tls-ca ca.pem --tls-cert cert.pem --tls-key key.pem
      only for processes with a certificate of that CA (EDL_TLS_CA, EDL_TLS_CERT and EDL_TLS_KEY there)"""


def main(argv: Sequence[str]) -> int:
    """Run `edl store`."""
    parser = argparse.ArgumentParser(
        prog="edl store",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--file", required=True, metavar="PATH", help="SQLite file with everything; created if missing")
    add("--host", default="::", help="IP address to listen on (default: ::, all addresses of this host)")
    add("--port", action=Port, default=DEFAULT_PORT, help=f"port to listen on; 0 for any (default: {DEFAULT_PORT})")
    add_server_credentials(parser, "processes", " (or EDL_TLS_CA, EDL_TLS_CERT, EDL_TLS_KEY, EDL_TOKEN_FILE)")
    add = parser.add_argument_group("log").add_argument
    add("--log-format", choices=("text", "json"), default="text", help="format on standard error (default: text)")
    add("--verbose", action="store_true", help="log debug lines as well")
    options = parser.parse_args(argv)
    log_to_stderr("edl store", verbose=options.verbose, log_format=options.log_format)
    given = Credentials.of_options(vars(options))
    if (options.tls_ca or options.tls_cert) and not (given.ca and given.cert):
        raise SettingsError("a store speaks mutual TLS or none: set --tls-ca, --tls-cert and --tls-key")
    credentials = store_credentials(given)
    files = CredentialFiles(credentials, serving=True) if credentials else None
    if "://" in options.file:
        meant = unquote(urlsplit(options.file).path) if options.file.startswith("sqlite:///") else ""
        hint = f"did you mean /{meant.lstrip('/')}?" if meant else "the file's path is expected, such as store.sqlite"
        raise SettingsError(f"--file {options.file}: this is a URL; {hint}")
    path = Path(options.file).absolute()
    with collect_signals() as caught, _alone(path), FailedHandshakes() as failed_handshakes:
        address = ListenAddress(options.host, options.port)
        server = StoreServer(str(path), address, files, StoreLimits(nbytes=_MOST_NBYTES))
        try:
            logger.info("serving the store in %s on port %d", options.file, server.port, extra={"port": server.port})
            if not credentials and not is_loopback(options.host):
                logger.warning(
                    "the store listens on %s without TLS or tokens: anyone who reaches it can change jobs and register"
                    " teachers (--tls-ca, --tls-cert and --tls-key: docs/security.md)",
                    options.host,
                )
            while not caught:
                if server.failed:
                    raise DiscoveryError("the server ended; see the log above")
                failed_handshakes.log()
                time.sleep(_POLL_S)
        finally:
            server.close()
        logger.info("stopped by %s", signal.Signals(caught[0]).name)
        return _BY_SIGNAL + caught[0]


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Refuse to serve a file that another `edl store` serves: their clients would miss each other's changes.

    Two locks are held, which the kernel releases when the process ends, also if it was killed. One is on a file beside
    the store's, which names the process and stays: it counts when another file takes the place of the store's. The
    other is on the store's file itself, and counts for a hard link, or when the first lock's file was removed. Other
    commands can still open the file (`sqlite://`) beside the server: SQLite takes locks of another kind (`fcntl`). On
    NFS they are of the same kind, and the second lock would keep SQLite out.
    """
    file = Path(os.path.realpath(path))
    note = Path(f"{file}.lock")
    with ExitStack() as held:

        def hold(place: Path) -> None:
            try:
                lock = FileLock(place)
            except OSError as exc:
                raise SettingsError(f"--file {path}: {place} cannot be opened: {exc.strerror}") from exc
            held.callback(lock.close)
            if not lock.take(fcntl.LOCK_EX):
                holder = note.read_text(errors="replace").strip() or "another process"
                raise SettingsError(
                    f"--file {path} is served already, by {holder}: stop that one, or name another file"
                )

        try:
            note.parent.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise SettingsError(f"--file {path}: {note.parent} cannot be made: {exc.strerror}") from exc
        hold(note)
        if not mounts.is_shared(mounts.file_system(str(file), mounts.read_mounts())):
            open_store(f"sqlite://{quote(str(file))}").close()  # makes it; an empty file without its journal is not one
            hold(file)
        note.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        yield
