"""Gradients between backward and the optimizer's step: summed over ranks, measured, and applied at another rate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from edl.collective.update.noise import Groups
from edl.errors import SettingsError

__all__ = ["NoiseMeter", "average_gradients", "rate_times"]

logger = logging.getLogger("edl.collective")

_BUCKET_BYTES = 25 * 2**20  # as DDP's: the copy of the gradients that is sent stays small


def average_gradients(parameters: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Replace each gradient by its mean over all ranks of `group`; every rank must call it with as many parameters.

    A rank without a gradient counts as zeros; where no rank has one there is none after it either, since an optimizer
    treats zeros otherwise (weight decay, moments).
    """
    world = dist.get_world_size(group)
    for bucket in _buckets(parameters):
        grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in bucket]
        if any(grad.layout is not torch.strided for grad in grads):
            raise SettingsError("sparse gradients cannot be averaged: build the embedding with sparse=False")
        present = torch.tensor([one.grad is not None for one in bucket], dtype=grads[0].dtype, device=grads[0].device)
        flat = torch.cat([*(grad.reshape(-1) for grad in grads), present])
        dist.all_reduce(flat, group=group)
        *sums, counts = torch.split(flat, [*(grad.numel() for grad in grads), len(bucket)])
        for parameter, total, found in zip(bucket, sums, counts.tolist(), strict=True):
            if found:
                parameter.grad = total.div(world).view_as(parameter)


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        bucket = kinds.setdefault((parameter.dtype, parameter.device), [])
        if bucket and sum(one.nbytes for one in bucket) + parameter.nbytes > _BUCKET_BYTES:
            yield list(bucket)
            bucket.clear()
        bucket.append(parameter)
    yield from kinds.values()


@contextmanager
def rate_times(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Every learning rate times `factor` for the block only: schedules and checkpoints see the user's rates."""
    if factor == 1.0:
        yield
        return
    before = [group["lr"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = rate


class NoiseMeter:
    """Measures the squared norm of each micro-batch's gradient, and of their mean.

    Hooks on the parameters see what one backward adds, before it is accumulated and before DDP averages it, so that no
    copy of a gradient is kept and nothing is sent but two numbers a step.
    """

    def __init__(self, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._options = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
        self._measuring = False
        self._squares: list[Tensor] = []
        self._weighted: list[Tensor] = []
        self._warned = False
        for parameter in parameters:
            parameter.register_hook(self._hook(parameter))  # type: ignore[no-untyped-call]

    @contextmanager
    def micro_batch(self, rows: int, factor: float) -> Iterator[None]:
        """Around the backward of a micro-batch of `rows` rows, whose loss was multiplied by `factor`."""
        self._measuring = rows > 0 and self._ready()
        try:
            yield
        finally:
            if self._measuring and self._squares:
                square = torch.stack(self._squares).sum(dtype=torch.float64)
                self._weighted.append(square * (rows / factor**2))
            self._measuring = False
            self._squares.clear()

    def finish(self, samples: int, group: dist.ProcessGroup | None, world: int) -> Groups:
        """What this step's gradients say, over all ranks; a collective if there are any.

        Args:
            samples: in the global batch.
        """
        grads = [one for one in self._parameters if one.grad is not None]
        device = grads[0].device if grads else torch.device("cpu")
        mine = torch.zeros(2, dtype=torch.float64, device=device)
        if self._weighted:
            mine[0], mine[1] = torch.stack(self._weighted).sum(), len(self._weighted)
        self._weighted.clear()
        if world > 1:
            dist.all_reduce(mine, group=group)
        squares = [self._square(one, one.grad) for one in grads if one.grad is not None]
        total = torch.stack(squares).sum(dtype=torch.float64) if squares else mine.new_zeros(())
        weighted, count, square = torch.cat([mine, total.reshape(1)]).tolist()
        return Groups(int(count), samples, weighted, square)

    def forget(self) -> None:
        """The step under way was given up."""
        self._weighted.clear()

    def _hook(self, parameter: Tensor) -> Callable[[Tensor], None]:
        def seen(grad: Tensor) -> None:
            if self._measuring:
                self._squares.append(self._square(parameter, grad))

        return seen

    def _square(self, parameter: Tensor, grad: Tensor) -> Tensor:
        grad = grad.detach()
        wide = torch.promote_types(grad.dtype, torch.float32)
        divisor = _divisor(self._optimizer.state.get(parameter, {}), self._options.get(parameter, {}))
        grad = grad.to(wide) if divisor is None else grad.to(wide) / divisor
        norm: Tensor = torch.linalg.vector_norm(grad)
        return norm.square()

    def _ready(self) -> bool:
        if isinstance(self._optimizer, torch.optim.SGD):
            return True
        if not self._optimizer.state:
            return False  # an adaptive optimizer has nothing to divide by before its first step
        known = {"exp_avg_sq", "square_avg", "sum", "momentum_buffer"}
        if not self._warned and not any(known & state.keys() for state in self._optimizer.state.values()):
            self._warned = True
            logger.warning(
                "gradient noise is measured without %s's own scaling, which EDL does not know; if it is an adaptive "
                "optimizer, choose another policy than AdaScale and no automatic batch",
                type(self._optimizer).__name__,
            )
        return True


def _divisor(state: dict[str, Any], options: dict[str, Any]) -> Tensor | None:
    """By what an optimizer of the kinds of Adam, RMSprop and Adagrad divides a gradient; None for others."""
    eps: float = options.get("eps", 0.0)
    if "exp_avg_sq" in state:
        second: Tensor = state.get("max_exp_avg_sq", state["exp_avg_sq"])
        corrected: Tensor = second / (1 - options["betas"][1] ** float(state["step"]))
        return corrected.sqrt().add(eps)
    for name in ("square_avg", "sum"):
        if name in state:
            found: Tensor = state[name]
            return found.sqrt().add(eps)
    return None
