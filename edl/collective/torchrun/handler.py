"""EDL's rendezvous for plain torchrun: `torchrun --rdzv-backend=edl --rdzv-endpoint=URL`.

The URL is a store's: `sqlite:///...`, `consul://...` or `etcd://...`. torch's own `DynamicRendezvousHandler` decides;
its state lies in that store, outside all agents, so that any node may die, also the first. `edl run` does not
use this (`edl.collective.agent.membership.rendezvous` is what it has instead), and shares no keys with it.
"""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    _get_timeout,
    _RendezvousExitOp,
)

from edl.collective.agent.command_line.address import own_address
from edl.collective.torchrun import state as rendezvous_state
from edl.collective.torchrun.store import SharedStore
from edl.discovery import Store, open_store
from edl.errors import DiscoveryError, ProtocolError, SettingsError
from edl.settings import default_discovery_url, read

__all__ = ["StoreBackend", "create_handler", "handler_creator"]

logger = logging.getLogger(__name__)


def handler_creator() -> Callable[[RendezvousParameters], DynamicRendezvousHandler]:
    """Return the handler's maker to torch, as the entry point `edl` of the group `torchrun.handlers`."""
    return create_handler


def create_handler(params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Make a handler for torchrun's options.

    The store is named by `--rdzv-conf store=URL`, else by `--rdzv-endpoint=URL`, else by `EDL_DISCOVERY`; without any
    of them it is the SQLite file of this user. So an endpoint that was another backend's may stay in a command line.
    Other options of `--rdzv-conf` are the options of torch's c10d rendezvous (`join_timeout`, `last_call_timeout`,
    `keep_alive_interval`, ...).

    Raises:
        SettingsError: an option cannot be used, or this version of torch is not known.
        DiscoveryError: the store cannot be opened.
    """
    rendezvous_state.check_torch()
    url = params.get("store") or params.endpoint or read("EDL_DISCOVERY", str) or default_discovery_url()
    if "://" not in url:
        raise SettingsError(
            f"{url}: the backend edl wants the URL of a store, such as sqlite:///path, consul://host:8500 or "
            "etcd://host:2379, as --rdzv-endpoint or --rdzv-conf store=URL"
        )
    store = open_store(url)
    return _Handler.over(store, params, own_address(url))


class StoreBackend(RendezvousBackend):
    """torch's rendezvous state in an EDL store, written by compare-and-set; the fencing token is the key's version.

    Args:
        store: shared by all nodes; stays the caller's to close.
        run_id: the job's name.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._key = _prefix(run_id) + "state"

    @property
    def name(self) -> str:
        """What `--rdzv-backend` calls it."""
        return "edl"

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return the state, as torch pickles it, and its token; None if there is none.

        Raises:
            RendezvousConnectionError: the store does not answer.
            RendezvousStateError: what it holds is no state.
        """
        try:
            entry = self._store.get(self._key)
            return None if entry is None else (pickle.dumps(rendezvous_state.decode(entry.value)), entry.version)
        except DiscoveryError as exc:
            raise RendezvousConnectionError(f"the store does not answer: {exc}") from exc
        except ProtocolError as exc:
            raise RendezvousStateError(f"{self._key} in the store is {exc}") from exc

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Write the state if `token` is still right, or, without a token, if there is no state yet.

        Returns:
            The state that holds now, its token, and whether it is the given state; None if there is none.

        Raises:
            RendezvousConnectionError, RendezvousStateError: as `get_state`.
        """
        data = rendezvous_state.encode(pickle.loads(state))  # noqa: S301 - which torch dumped in this very process
        try:
            entry = self._store.compare_and_set(self._key, data, token)
        except DiscoveryError as exc:
            raise RendezvousConnectionError(f"the store does not answer: {exc}") from exc
        if entry is not None:
            return state, entry.version, True
        present = self.get_state()
        return None if present is None else (*present, False)


class _Handler(DynamicRendezvousHandler):
    """torch's handler, but for what it says when a node is late, gone or started again."""

    _shared: Store

    @classmethod
    def over(cls, store: Store, params: RendezvousParameters, addr: str) -> _Handler:
        handler: _Handler = cls.from_backend(
            params.run_id,
            SharedStore(store, _prefix(params.run_id) + "store/"),
            StoreBackend(store, params.run_id),
            params.min_nodes,
            params.max_nodes,
            params.local_addr or addr,
            RendezvousTimeout(*(_get_timeout(params, name) for name in ("join", "last_call", "close", "heartbeat"))),
            keep_alive_interval=params.get_as_int("keep_alive_interval") or 5,
            keep_alive_max_attempt=params.get_as_int("keep_alive_max_attempt") or 3,
        )
        handler._shared = store
        return handler

    def next_rendezvous(self) -> RendezvousInfo:
        # As it comes, torch gives the workers of each round the same store, in which those of a later round find the
        # addresses of processes that are gone. Without these two it makes a new one.
        self._bootstrap_store_info = None
        self._shared_tcp_store_server = None
        try:
            return super().next_rendezvous()
        except RendezvousClosedError as exc:
            raise RendezvousClosedError(
                f"job {self.get_run_id()} has ended already: nothing to do. Another --rdzv-id starts another job."
            ) from exc

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait to join, this one among them if the others have gone on without it.

        A node that was silent for too long is removed by the others, and gives no more signs of life; torch does not
        let it know, so that it would train beside them. torchrun restarts its workers where a node waits, and with
        that this one joins again.
        """
        waiting = super().num_nodes_waiting()
        if waiting or self._this_node in self._state_holder.state.participants:
            return waiting
        logger.warning("the others went on without this node, which was silent: it joins them again")
        return 1

    def shutdown(self) -> bool:
        """End the job; but if torchrun ends with an exception, only this node leaves.

        torch closes the rendezvous for all nodes in both cases. Here a node whose machine fails leaves the job to the
        others.
        """
        failed = sys.exc_info()[0] is not None  # torchrun calls this while the exception is on its way
        try:
            return self._leave() if failed else super().shutdown()
        finally:
            self._shared.close()

    def _leave(self) -> bool:
        self._stop_heartbeats()
        try:
            self._op_executor.run(_RendezvousExitOp(), self._get_deadline(self.settings.timeout.close))
        except RendezvousError:
            return False
        return True


def _prefix(run_id: str) -> str:
    return f"rendezvous/{quote(run_id, safe='')}/"
