"""Hosts that a job leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from edl.collective.agent.context import AgentContext
from edl.collective.agent.join import _is_excluded
from edl.collective.agent.membership.excluded_hosts import Exclusions, host_key
from edl.collective.agent.shutdown import ShutdownState
from edl.collective.goodput.records import read_job
from edl.collective.job_records import Exclusion
from edl.discovery import Store, open_store
from edl.errors import ProtocolError

FAULT = "rank 1: RuntimeError: CUDA error: unspecified launch failure"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path}/store.sqlite") as store:
        yield store


def test_excluded_host_stays_out(store: Store) -> None:
    here, there = Exclusions(store, "job", "a"), Exclusions(store, "job", "b")
    broken = Exclusion("node-a", "rank 0: ECC", True, 7, 1.0)
    here.add(broken)
    assert (here.own_exclusion(), there.own_exclusion()) == (broken, None)
    assert Exclusions(store, "another", "a").own_exclusion() is None
    assert read_job(store, "job").exclusions == (broken,)
    here.remove()
    assert here.own_exclusion() is None


@pytest.mark.parametrize(
    ("step", "clear", "same"), [(7, False, True), (5, False, True), (8, False, False), (7, True, False)]
)
def test_fault_at_one_step_is_the_scripts(store: Store, step: int, clear: bool, same: bool) -> None:
    here, there = Exclusions(store, "job", "a"), Exclusions(store, "job", "b")
    first = Exclusion("node-a", FAULT, clear, 7)
    here.add(first)
    assert here.find_same_elsewhere(first) is None, "its own record is not another host"
    found = there.find_same_elsewhere(Exclusion("node-b", FAULT, False, step))
    assert found == (first if same else None)
    there.remove_unclear()
    assert (here.own_exclusion() is None) is not clear


def test_host_key_is_of_a_boot_and_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    first = host_key()
    assert first == host_key(), "the same from process to process"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert host_key() != first


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"node": 3, "reason": ""}', b'{"node": "a", "reason": "b", "at_s": ""}']
)
def test_odd_record_is_an_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="left out"):
        Exclusion.decode(data)


def test_readmit_lets_a_host_join_again(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    exclusions = Exclusions(store, "job", host_key())
    exclusions.add(Exclusion("node-a", FAULT))

    def left_out(*, readmit: bool) -> bool:
        spec = SimpleNamespace(job="job", readmit=readmit)
        return _is_excluded(
            cast(AgentContext, SimpleNamespace(store=store, spec=spec, id="node-b", shutdown=ShutdownState()))
        )

    assert left_out(readmit=False)
    assert f"leaves this host out ({FAULT})" in caplog.messages[-1]
    assert "`edl run --readmit`" in caplog.messages[-1]
    assert not left_out(readmit=True)
    assert not left_out(readmit=False), "it need be said once only"
