"""A read of the SQLite file and the renewal of a lease, at the same moment."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from edl.discovery import Instance, open_registry, open_store
from edl.discovery.common.renewal import RenewedLease, RenewedRegistration


def test_renewed_entry_is_never_gone(tmp_path: Path) -> None:
    """What is being renewed is never seen to be gone."""
    # A read that asked for the time first, and then for the rows, took a renewal in between for one by another clock.
    url = f"sqlite:///{tmp_path}/discovery.sqlite"
    done = threading.Event()
    with (
        open_store(url) as theirs,
        open_store(url) as ours,
        open_registry(url) as elsewhere,
        open_registry(url) as registry,
        elsewhere.register(Instance("service", "a", "127.0.0.1", 9000), 10.0) as registration,
    ):
        lease = theirs.lease(10.0)
        assert isinstance(lease, RenewedLease)
        assert isinstance(registration, RenewedRegistration)
        theirs.put("key", b"held", lease)

        def renew() -> None:
            while not done.is_set():
                lease.claim.renew()
                registration._claim.renew()

        renewing = threading.Thread(target=renew)
        renewing.start()
        try:
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline:
                assert ours.get("key") is not None
                assert len(ours.list("k")) == 1
                assert registry.services() == ("service",)
                assert len(registry.snapshot("service").instances) == 1
        finally:
            done.set()
            renewing.join(20)
