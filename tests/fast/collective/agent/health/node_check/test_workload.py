"""Devices that compute, copy or add up wrongly are found out. There is no GPU: functions of torch are faked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store

from edl.collective.agent.health.node_check import workload
from edl.collective.agent.health.node_check.workload import (
    agree_on_gpus,
    check_copies,
    check_products,
    check_sum,
    find_devices,
)
from edl.errors import EDLError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "_SIZE", {"cpu": 96})
    monkeypatch.setattr(workload, "_COPIED", 5000)
    monkeypatch.setattr(workload, "_REDUCED", 5000)


def spoiled(function: Callable[..., Any], at_call: int) -> Callable[..., Any]:
    """A fake of a function of torch's, of whose results one has a wrong number: the one it returns or writes to."""
    calls = 0

    def fake(first: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        result = function(first, *args, **kwargs)
        calls += 1
        if calls == at_call:
            (first if result is None else result).view(-1)[17] += 1
        return result

    return fake


def test_all_gpus_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_devices() == [CPU]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert find_devices() == [torch.device("cuda", index) for index in range(3)]


def test_wrong_product_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_products(CPU) > 0
    monkeypatch.setattr(torch, "matmul", spoiled(torch.matmul, at_call=20))
    with pytest.raises(EDLError, match=r"^cpu: a matrix product has 1 of 9216 numbers wrong$"):
        check_products(CPU)


def test_wrong_copy_names_both_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU three times in the place of three GPUs."""
    check_copies([CPU] * 3)
    monkeypatch.setattr(torch.Tensor, "copy_", spoiled(torch.Tensor.copy_, at_call=6))
    with pytest.raises(EDLError, match=r"^GPU 2 to GPU 1: a copy has 1 of 5000 numbers wrong$"):
        check_copies([CPU] * 3)


def make_group(backend: str, store: Store, device: torch.device) -> None:
    assert (backend, device) == ("gloo", CPU)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)


def test_wrong_sum_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_sum(make_group, HashStore(), []) > 0
    assert not dist.is_initialized()
    monkeypatch.setattr(dist, "all_reduce", spoiled(dist.all_reduce, at_call=4))
    try:
        with pytest.raises(EDLError, match=r"^cpu: a sum over 1 nodes has 1 of 5000 numbers wrong$"):
            check_sum(make_group, HashStore(), [])
    finally:
        dist.destroy_process_group()


def test_each_gpu_adds_up_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str]] = []

    def make(backend: str, store: Store, device: torch.device) -> None:
        made.append((backend, str(device)))
        raise EDLError("no GPU")

    with pytest.raises(EDLError, match="no GPU"):
        check_sum(make, HashStore(), [torch.device("cuda", 0), torch.device("cuda", 1)])
    assert made == [("nccl", "cuda:0")]
    store = HashStore()
    store.set("gpus/1", "4")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert agree_on_gpus(store, 0, 2, 8) == 4
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert agree_on_gpus(store, 0, 2, 8) == 0
