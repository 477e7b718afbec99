"""The process group of a generation, in a process that outlives it: it can be aborted from another thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore, distributed_c10d  # type: ignore[attr-defined]

from edl.background import start_call
from edl.collective.inprocess.sockets import GroupSockets, find_connections
from edl.errors import EDLError, SettingsError
from edl.settings import read

__all__ = ["LEFT", "AbortableProcessGroup", "unsupported_reason"]

LEFT: Final = "EDL: left the process group"
"""How the message of an error begins that is no fault of the script's; `agent.health.failures` knows it."""
_TESTED: Final = ((2, 13), (3, 0))
"""Versions of torch, from the first until before the second, in which shutting sockets down was seen to end a wait for
peers. In another version that wait may be for something else, and would last until its timeout."""
_POLL_S: Final = 0.005
"""Between two looks for the other ranks: a longer pause adds to each recovery, a shorter one keeps a core busy."""


class AbortableProcessGroup:
    """torch's default process group, for a generation.

    `connect_store` and `wait_for_ranks` come first, where there is an agent; then `track_sockets`, `init_group`, and
    `end_tracking` when the group was used once. `abort` may come at any time, `destroy` is the end.

    Args:
        rank: of this process, as it is to be.
        size: the number of ranks.
        backend: of torch.
        timeout_s: of collectives, in seconds.
    """

    def __init__(self, rank: int, size: int, backend: str, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._backend = backend
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Store | None = None
        self._store_connection: frozenset[int] = frozenset()
        self._sockets: GroupSockets | None = None

    def connect_store(self, interrupt: Callable[[], object]) -> None:
        """Connect to the store that the first node's agent serves for this generation alone.

        torch's client sleeps for seconds between two attempts to reach a store that is gone, and waits without an end
        for the answer of a store that stands still, as it does while DNS does not tell it a peer's name. Nothing wakes
        it. So a thread makes it, which is left behind where its generation is over.

        Args:
            interrupt: called again and again; may raise to leave.

        Raises:
            SettingsError: the environment does not name the store.
            EDLError: the store did not answer within the timeout of collectives.
        """
        address, port = read("MASTER_ADDR", str), read("MASTER_PORT", int)
        if address is None or port is None:
            raise SettingsError("MASTER_ADDR and MASTER_PORT are not set: start this program with `edl run`")
        deadline = time.monotonic() + self._timeout.total_seconds()
        before = frozenset(find_connections())
        connecting = start_call(
            "edl-store-connect", partial(TCPStore, address, port, is_master=False, timeout=self._timeout)
        )
        failure = f"{LEFT}: no store answers at {address}:{port} within {self._timeout.total_seconds():g} s"
        while self._store is None:
            interrupt()
            try:
                self._store = connecting.result(_POLL_S)
            except FutureTimeoutError as exc:
                if time.monotonic() > deadline:
                    raise EDLError(failure) from exc
            except (dist.DistNetworkError, dist.DistStoreError) as exc:
                raise EDLError(failure) from exc
        self._store_connection = frozenset(find_connections()) - before

    def wait_for_ranks(self, barrier: str, timeout_s: float, interrupt: Callable[[], object]) -> None:
        """Wait in the store until all ranks are there.

        Args:
            barrier: a name for this wait.
            timeout_s: how long to wait, in seconds.
            interrupt: called again and again; may raise to leave.

        Raises:
            EDLError: some ranks did not come in time.
        """
        assert self._store is not None
        keys = [f"{barrier}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], "")
        deadline = time.monotonic() + timeout_s
        while not self._store.check(keys):
            interrupt()
            if time.monotonic() > deadline:
                lacking = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise EDLError(f"{LEFT}: ranks {lacking} did not come within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def track_sockets(self) -> None:
        """Let `abort` reach what `init_group` waits for, from here on."""
        self._sockets = GroupSockets(until_end=self._store_connection)

    def init_group(self) -> None:
        """Make torch's default group: through the store, or where there is none as torchrun's environment says."""
        store: Store | None = None if self._store is None else PrefixStore("group", self._store)
        if store is None and read("RANK", int) is None:  # plain `python train.py`
            store = HashStore()
        if store is None:
            dist.init_process_group(self._backend, timeout=self._timeout)
        else:
            dist.init_process_group(
                self._backend, store=store, rank=self.rank, world_size=self.size, timeout=self._timeout
            )

    def end_tracking(self) -> None:
        """Take no connection from now on for the group's: it was used, and has all that it needs."""
        if self._sockets is not None:
            self._sockets.end_tracking()

    def abort(self) -> None:
        """End all waits in collectives of this group, here and on its peers. From any thread."""
        if self._sockets is not None:
            self._sockets.shut_down()

    def destroy(self) -> None:
        """Give the group and its store back. Other references to the group keep it."""
        self._store = None
        if dist.is_initialized():
            dist.destroy_process_group()
        # A group that could not be made was counted all the same, and torch names groups, and their keys in the store,
        # by the count: this process would never meet a new worker again.
        distributed_c10d._world.group_count = 0


def unsupported_reason(backend: str) -> str:
    """Return why this torch or backend does not let go of a broken group; empty if it does.

    Args:
        backend: of torch.
    """
    first, end = _TESTED
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not first <= version < end:
        return f"torch {torch.__version__} is not among the versions {first[0]}.{first[1]} to <{end[0]}.{end[1]}"
    return "" if backend == "gloo" else f"a broken group of backend {backend} is let go of by its process's end only"
