"""A TCP proxy that can refuse, fall silent, and cut connections: a network between a client and its server."""

from __future__ import annotations

import contextlib
import socket
import threading


class TcpProxy:
    """Forwards connections to a server, from a port of 127.0.0.1 that stays the same.

    Args:
        host: of the server.
        port: of the server.
    """

    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._refusing = False
        self.connections = 0
        self.silent = False
        """Whether bytes are thrown away in both directions, while connections stay."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._refusing:
                    client.close()
                    continue
                self.connections += 1
                try:
                    server = socket.create_connection(self._server, timeout=10)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                with self._lock:
                    self._sockets |= {client, server}
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self.silent:
                    sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            known = source in self._sockets
            self._sockets.discard(source)
        if known:
            source.close()

    def cut(self) -> None:
        """Close the connections there are; new ones are taken."""
        with self._lock:
            sockets = list(self._sockets)
        for end in sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def refuse(self) -> None:
        """Close the connections, and new ones as soon as they are there."""
        self._refusing = True
        self.cut()

    def restore(self) -> None:
        """Forward again."""
        self.silent = False
        self._refusing = False

    def close(self) -> None:
        """End everything: from now on connections are refused."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
