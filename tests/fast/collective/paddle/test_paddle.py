"""Paddle's trainers: their environment, ports that stay free for them, and state that comes back bit for bit."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of paddle's own imports
    paddle = pytest.importorskip("paddle", reason="PaddlePaddle is not installed")

from edl.collective.agent.launch_spec import ReservedPorts
from edl.collective.agent.worker_group import paddle_environment
from edl.collective.checkpoint.memory.slots import SlotPair
from edl.collective.integrations.paddle import Checkpointer, PaddleState
from edl.collective.job_records import JobState, Member, World
from edl.errors import SettingsError

WORLD = World(3, JobState.RUNNING, (Member("b", "10.0.0.2", 7000, 2, 0), Member("a", "10.0.0.1", 9000, 1, 2)))


def test_trainers_find_launcher_variables() -> None:
    environ = paddle_environment(WORLD, WORLD.nodes[1], 0)
    assert environ["PADDLE_TRAINER_ID"] == environ["PADDLE_GLOBAL_RANK"] == "2"
    assert environ["PADDLE_TRAINERS_NUM"] == environ["PADDLE_GLOBAL_SIZE"] == "3"
    assert environ["PADDLE_TRAINER_ENDPOINTS"] == "10.0.0.2:7001,10.0.0.2:7002,10.0.0.1:9001"
    assert environ["PADDLE_CURRENT_ENDPOINT"] == "10.0.0.1:9001"
    assert environ["PADDLE_MASTER"] == "10.0.0.2:7000"
    assert (environ["PADDLE_LOCAL_SIZE"], environ["PADDLE_RANK_IN_NODE"], environ["PADDLE_NNODES"]) == ("1", "0", "2")
    assert environ["PADDLE_DISTRI_BACKEND"] == "gloo"
    first = paddle_environment(WORLD, WORLD.nodes[0], 1, gpu=True)
    assert f"{first['MASTER_ADDR']}:{first['MASTER_PORT']}" == first["PADDLE_MASTER"], "which Paddle reads first"
    assert (first["FLAGS_selected_gpus"], first.get("PADDLE_DISTRI_BACKEND")) == ("1", None)


def test_reserved_ports_are_the_trainers() -> None:
    reserved = ReservedPorts(3)
    try:
        for port in range(reserved.port, reserved.port + 3):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("", port))
            with socket.socket() as trainer:
                trainer.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trainer.bind(("", port))
                trainer.listen()
    finally:
        reserved.close()


# --- State. ---


class Net(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = paddle.nn.Linear(4, 3)
        self.norm = paddle.nn.BatchNorm1D(3)
        self.drop = paddle.nn.Dropout(0.5)
        self.register_buffer("seen", paddle.zeros([], dtype="int64"))

    def forward(self, x: Any) -> Any:
        self.seen += 1
        return self.drop(self.norm(self.inner(x)))


def bits(tensor: Any) -> tuple[str, tuple[int, ...], bytes]:
    return str(tensor.dtype), tuple(tensor.shape), tensor.numpy().tobytes()


def bits_of(values: dict[str, Any]) -> dict[str, Any]:
    return {name: bits(value) if isinstance(value, paddle.Tensor) else value for name, value in values.items()}


class Job:
    """A model in training. As in a process of its own, Paddle numbers its names from 0."""

    def __init__(self, make: Callable[..., Any] = paddle.optimizer.AdamW) -> None:
        self._names = paddle.base.unique_name.UniqueNameGenerator()
        with paddle.utils.unique_name.guard(self._names):
            self.model = Net()
            self.schedule = paddle.optimizer.lr.StepDecay(0.1, 2)
            self.optimizer = make(parameters=self.model.parameters(), learning_rate=self.schedule)
        self.state = PaddleState(model=self.model, optimizer=self.optimizer)

    def train(self, steps: int) -> list[float]:
        return [self._step() for _ in range(steps)]

    def _step(self) -> float:
        with paddle.utils.unique_name.guard(self._names):
            loss = (self.model(paddle.rand([5, 4])) ** 2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.clear_grad()
            self.schedule.step()
            return float(loss)


@pytest.fixture
def slots(tmp_path: Path) -> Callable[[], SlotPair]:
    return lambda: SlotPair(tmp_path / "slots")


def restored(saved: PaddleState, into: PaddleState, slots: Any) -> None:
    with Checkpointer(saved, slots=slots()) as checkpointer:
        checkpointer.save(0, force=True)
    with Checkpointer(into, slots=slots()) as checkpointer:
        checkpointer.restore()


@pytest.mark.filterwarnings("ignore::UserWarning:paddle")
@pytest.mark.parametrize(("name", "used"), [("AdamW", False), ("AdamW", True), ("Momentum", True), ("Lamb", False)])
def test_training_goes_on(name: str, used: bool, slots: Any) -> None:
    """Into a new process, and into one that has trained already; dropout included."""
    make = getattr(paddle.optimizer, name)
    job = Job(make)
    job.train(3)
    with Checkpointer(job.state, slots=slots()) as checkpointer:
        checkpointer.save(2, force=True)
    wanted = job.train(3)

    again = Job(make)
    again.train(2 if used else 0)
    with Checkpointer(again.state, slots=slots()) as checkpointer:
        assert checkpointer.restore() == 2
    assert again.train(3) == wanted
    assert bits_of(again.model.state_dict()) == bits_of(job.model.state_dict())
    assert bits_of(again.optimizer.state_dict()) == bits_of(job.optimizer.state_dict())


@pytest.mark.filterwarnings("ignore::UserWarning:paddle")
def test_restored_state_is_a_copy(slots: Any) -> None:
    job = Job()
    job.train(1)
    with Checkpointer(job.state, slots=slots(), interval_steps=1) as checkpointer:
        checkpointer.save(0)
        before = bits_of(job.model.state_dict()), bits_of(job.optimizer.state_dict())
        again = Job()
        with Checkpointer(again.state, slots=slots()) as other:
            assert other.restore() == 0
        job.train(2)
        checkpointer.save(1)
        checkpointer.save(2)  # both slots have been written since
    assert (bits_of(again.model.state_dict()), bits_of(again.optimizer.state_dict())) == before


DTYPES = ["float64", "float32", "float16", "bfloat16", "complex64", "bool", "uint8", "int8", "int16", "int32", "int64"]


@pytest.mark.parametrize("shape", [(), (2, 3), (0, 2)], ids=str)
def test_tensors_of_every_type_come_back(shape: tuple[int, ...], slots: Any) -> None:
    def make(seed: int) -> dict[str, Any]:
        random = np.random.default_rng(seed)
        values = {
            dtype: random.integers(0, 2, shape) if dtype == "bool" else random.normal(0, 9, shape) for dtype in DTYPES
        }
        return {dtype: paddle.to_tensor(value).astype(dtype) for dtype, value in values.items()}

    first, second = make(1), make(2)
    state = PaddleState(**second)
    restored(PaddleState(**first), state, slots)
    for dtype in DTYPES:
        assert bits(second[dtype]) == bits(first[dtype])
        assert getattr(state, dtype) is second[dtype]


def test_master_weights_keep_their_names(slots: Any) -> None:
    """With weights of fewer bits than the optimizer's: accumulators are named after the master weights."""

    def make() -> tuple[Any, Any]:
        with paddle.utils.unique_name.guard():
            model = paddle.nn.Linear(3, 2).to(dtype="bfloat16")
            return model, paddle.optimizer.SGD(0.1, model.parameters(), multi_precision=True)

    def step(model: Any, optimizer: Any) -> None:
        for parameter in model.parameters():
            parameter.grad = paddle.full_like(parameter, 0.01)
        optimizer.step()

    model, optimizer = make()
    other, resumed = make()
    step(model, optimizer)
    restored(PaddleState(model=model, optimizer=optimizer), PaddleState(model=other, optimizer=resumed), slots)
    step(model, optimizer)
    step(other, resumed)
    assert bits_of(other.state_dict()) == bits_of(model.state_dict())
    masters = [one.state_dict()["master_weights"] for one in (optimizer, resumed)]
    assert bits_of(masters[0]) == bits_of(masters[1])
    assert [each.name for each in masters[0].values()] == [each.name for each in masters[1].values()]


@pytest.mark.filterwarnings("ignore::UserWarning:paddle")
def test_another_model_is_refused_in_words(slots: Any) -> None:
    saved = PaddleState(model=paddle.nn.Linear(4, 3))
    with pytest.raises(SettingsError, match=r"weight was saved as float32\(4, 3\), but is now float32\(4, 2\)"):
        restored(saved, PaddleState(model=paddle.nn.Linear(4, 2)), slots)
    with pytest.raises(SettingsError, match="one of the two lacks bias"):
        restored(saved, PaddleState(model=paddle.nn.Linear(4, 3, bias_attr=False)), slots)
    job = Job()
    job.train(1)
    with paddle.utils.unique_name.guard():
        optimizer = paddle.optimizer.AdamW(parameters=paddle.nn.Conv2D(1, 1, 1).parameters())
    with pytest.raises(SettingsError, match="in the order in which they were created"):
        restored(PaddleState(optimizer=job.optimizer), PaddleState(optimizer=optimizer), slots)


def test_unmet_trainers_do_not_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    from edl.collective.checkpoint.checkpointer import Checkpointer as TorchCheckpointer

    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    refused = pytest.raises(SettingsError, match=r"import Checkpointer and PaddleState from edl.collective.paddle")
    with TorchCheckpointer(PaddleState(epoch=1)) as checkpointer, refused:
        checkpointer.save(0, force=True)
    with pytest.raises(SettingsError, match=r"init_parallel_env"):
        Checkpointer(PaddleState(epoch=1))
