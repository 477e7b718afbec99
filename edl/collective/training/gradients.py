"""Works on gradients between backward and the optimizer: averages them over ranks, and estimates their noise.

The noise is estimated from groups of samples that every optimizer step has: the micro-batches of all ranks, before
their gradients are summed. If G is the true gradient and Σ the covariance of one sample's gradient, a mean over n
samples has the expected squared norm |G|² + tr(Σ)/n. McCandlish et al., "An Empirical Model of Large-Batch Training",
2018, appendix A.1, solve this for two batch sizes. This module solves the equations as in an analysis of variance, for
k groups of n_i samples with mean gradients g_i, and n samples in all with mean gradient g:

    tr(Σ) ≈ (Σ n_i |g_i|² - n |g|²) / (k - 1)        |G|² ≈ |g|² - tr(Σ) / n

If the optimizer divides each gradient by its own scale (Adam and similar optimizers), all norms are those of the
divided gradients, as in Qiao et al., "Pollux", OSDI 2021. Without the division, the noise in an Adam run says little
about the run's progress.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from edl.collective.checkpoint.state.fields import layers
from edl.errors import SettingsError

logger = logging.getLogger("edl.collective")


def check_wrapping(module: nn.Module, group: dist.ProcessGroup | None, *, accumulates: bool) -> None:
    """Refuse a module whose gradients would be averaged twice, only in part, or over ranks other than `group`'s."""
    own = layers(module)
    inside = [part for part in module.modules() if all(part is not layer for layer in own)]
    if any(isinstance(part, DistributedDataParallel) for part in inside):
        raise SettingsError(
            "a part of the model is wrapped in DistributedDataParallel, which would average its gradients twice: wrap "
            "the whole model, and pass the result to ElasticTrainer"
        )
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in inside):
        raise SettingsError("FullyShardedDataParallel is not supported: use torch.distributed.fsdp.fully_shard")
    whole = any(isinstance(part, FSDPModule) for part in own)
    if not whole and any(isinstance(part, DTensor) for part in module.parameters()):
        raise SettingsError(
            "fully_shard was called on parts of the model but not on the whole, so the gradients of the rest would not "
            "be averaged: call fully_shard(model), too, after its parts"
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and not _is_sharded_over(parameter, _ranks(group)):
            raise SettingsError(
                f"{name} is sharded over {parameter.device_mesh}, {list(parameter.placements)}; ElasticTrainer "
                "averages gradients over all ranks of its group, each with its own data: shard over a mesh of exactly "
                "these ranks (fully_shard, or HSDP over all of them). Tensor, pipeline and context parallelism are "
                "not supported"
            )
    for part in own:
        if not isinstance(part, DistributedDataParallel):
            continue
        if part.static_graph and accumulates:
            raise SettingsError(
                "DistributedDataParallel(static_graph=True) fails if a step has several micro-batches: remove "
                "either static_graph, or all of max_micro_batch, AdaScale and auto"
            )
        if _ranks(part.process_group) != _ranks(group):
            raise SettingsError(
                "DistributedDataParallel averages over different ranks than ElasticTrainer: pass both the same group"
            )


def check_materialized(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise SettingsError(f"{name} of the model has no shape yet: run a batch through the lazy module first")


def check_averaged(updated: Iterable[Tensor], parameters: Iterable[Tensor]) -> None:
    strangers = set(map(id, updated)) - set(map(id, parameters))
    if strangers:
        raise SettingsError(
            f"the optimizer has {len(strangers)} parameters that the model lacks, whose gradients would not be "
            "averaged. Create the optimizer after fully_shard, and pass ElasticTrainer a module with all of them, such "
            "as an nn.ModuleList"
        )


def averages_itself(module: nn.Module) -> bool:
    """Return whether a module's backward pass averages gradients over the ranks. Every rank must then run that pass."""
    return any(isinstance(part, (DistributedDataParallel, FSDPModule)) for part in layers(module))


def is_sharded(module: nn.Module) -> bool:
    return any(isinstance(part, FSDPModule) for part in module.modules())


def in_lockstep(module: nn.Module) -> bool:
    """Return whether the forward pass waits for other ranks, so that all must run the same number of micro-batches."""
    return any(isinstance(part, (FSDPModule, nn.SyncBatchNorm)) for part in module.modules())


def least_rows(module: nn.Module) -> int:
    """Return the fewest rows that a micro-batch should have: 2 if a layer uses this rank's own variance, else 1."""
    return 2 if any(map(_is_local_norm, module.modules())) else 1


def fails_with_one_row(module: nn.Module) -> bool:
    """Return whether a layer normalizes over rows alone; BatchNorm2d and BatchNorm3d also average over pixels."""
    return any(
        _is_local_norm(part) and not isinstance(part, (nn.BatchNorm2d, nn.BatchNorm3d)) for part in module.modules()
    )


def _is_local_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm)


@contextmanager
def without_averaging(module: nn.Module) -> Iterator[None]:
    """Accumulate gradients on this rank only: DDP and FSDP send nothing for backward passes in the block."""
    for part in layers(module):
        if isinstance(part, DistributedDataParallel):
            with part.no_sync():
                yield
            return
        if isinstance(part, FSDPModule):
            part.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                part.set_requires_gradient_sync(True)
            return
    yield


def _is_sharded_over(parameter: DTensor, ranks: list[int]) -> bool:
    """Return whether `fully_shard` sharded a parameter over exactly these ranks, in one group or as HSDP."""
    mesh, placements = parameter.device_mesh, parameter.placements
    if sorted(mesh.mesh.flatten().tolist()) != sorted(ranks):
        return False
    # If a parameter is already parallel in another way, the placements are (Shard, ...), never (Replicate, Shard).
    return mesh.ndim == 1 or (mesh.ndim == 2 and placements[0].is_replicate() and placements[1].is_shard())


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group or dist.group.WORLD)


_BUCKET_BYTES = 25 * 2**20  # DDP's bucket size; it bounds the memory for the copy of the gradients that is sent
# A squared normal number over the mean square of k others has a finite mean from k = 3 on, a finite variance from 5 on.
_WARM_STEPS = 10  # before an adaptive optimizer's mean of squares is trusted, with which gradients are divided

_MEANS = ("exp_avg_sq", "square_avg", "sum")


@torch.no_grad()
def average_gradients(parameters: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Replace gradients by their means over all ranks. Collective: every rank passes the same number of parameters."""
    world = dist.get_world_size(group)
    for bucket in _buckets(parameters):
        grads = [torch.zeros_like(p, dtype=_dtype_of(p)) if p.grad is None else p.grad for p in bucket]
        if any(grad.layout is not torch.strided for grad in grads):
            raise SettingsError("sparse gradients cannot be averaged: build the embedding with sparse=False")
        present = torch.tensor([p.grad is not None for p in bucket], dtype=grads[0].dtype, device=grads[0].device)
        flat = torch.cat([*(grad.reshape(-1) for grad in grads), present])
        dist.all_reduce(flat.div_(world), group=group)  # divide first, as DDP does: a sum of half floats may overflow
        *sums, counts = torch.split(flat, [*(grad.numel() for grad in grads), len(bucket)])
        for parameter, total, found in zip(bucket, sums, counts.tolist(), strict=True):
            if not found:  # optimizers treat a zero gradient differently from a missing one (weight decay, moments)
                continue
            if parameter.grad is None:
                parameter.grad = total.clone().view_as(parameter)
            else:
                parameter.grad.copy_(total.view_as(parameter))


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        bucket = kinds.setdefault((_dtype_of(parameter), parameter.device), [])
        if bucket and sum(tensor.nbytes for tensor in bucket) + parameter.nbytes > _BUCKET_BYTES:
            yield list(bucket)
            bucket.clear()
        bucket.append(parameter)
    yield from kinds.values()


def _dtype_of(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradients, which the user can choose in newer versions of PyTorch."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


class NoiseMeter:
    """Measures the squared norms of the gradients of micro-batches, and of the mean gradient.

    Hooks see what each backward pass adds, before DDP averages it. So no copy of the gradients is kept, and a step
    sends only two numbers.
    """

    def __init__(self, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._chosen: dict[Tensor, dict[str, Any]] | None = None
        self._warm: dict[Tensor, dict[str, Any]] = {}
        self._measuring = False
        self._squares: list[Tensor] = []
        self._weighted: list[Tensor] = []
        self._warned = False
        for parameter in parameters:
            parameter.register_hook(self._hook(parameter))  # type: ignore[no-untyped-call]

    @contextmanager
    def micro_batch(self, rows: float, factor: float) -> Iterator[None]:
        """Measure the backward pass in the block, whose loss was multiplied by `factor`. If `rows` is 0, do nothing."""
        self._measuring = rows > 0
        try:
            yield
        finally:
            if self._squares:
                square = torch.stack(self._squares).sum(dtype=torch.float64)
                self._weighted.append(square * (rows / factor**2))
            self._measuring = False
            self._squares.clear()

    def finish_step(self, samples: int, group: dist.ProcessGroup | None, world: int) -> GradientGroups:
        """Return this step's squared norms over all ranks, and drop the measurements. Collective if `world` > 1."""
        mine = torch.zeros(2, dtype=torch.float64, device=self._parameters[0].device)
        if self._weighted:
            mine[0], mine[1] = torch.stack(self._weighted).sum(), len(self._weighted)
        if world > 1:
            dist.all_reduce(mine, group=group)
        squares = [self._square(p, p.grad) for p in self._measured() if p.grad is not None]
        total = torch.stack(squares).sum(dtype=torch.float64) if squares else mine.new_zeros(())
        weighted, count, square = torch.cat([mine, total.reshape(1)]).tolist()
        self.discard_step()
        return GradientGroups(int(count), samples, weighted, square)

    def discard_step(self) -> None:
        self._weighted.clear()
        self._chosen = None

    def _hook(self, parameter: Tensor) -> Callable[[Tensor], None]:
        def seen(grad: Tensor) -> None:
            if self._measuring and parameter in self._measured():
                self._squares.append(self._square(parameter, grad))

        return seen

    def _square(self, parameter: Tensor, grad: Tensor) -> Tensor:
        grad = grad.detach()
        wide = torch.promote_types(grad.dtype, torch.float32)
        divisor = divisor_of(self._optimizer.state.get(parameter, {}), self._measured()[parameter])
        grad = grad.to(wide) if divisor is None else grad.to(wide) / divisor
        norm: Tensor = torch.linalg.vector_norm(grad)
        return norm.square()

    def _measured(self) -> dict[Tensor, dict[str, Any]]:
        """Return the parameters that count in this step with their group's options, the same on all ranks."""
        if self._chosen is None:
            options = {p: group for group in self._optimizer.param_groups for p in group["params"]}
            self._chosen = {p: options[p] for p in self._parameters if p in options and self._counts(p, options[p])}
        return self._chosen

    def _counts(self, parameter: Tensor, options: dict[str, Any]) -> bool:
        if isinstance(self._optimizer, torch.optim.SGD):
            return True
        state = self._optimizer.state.get(parameter)
        if not state:
            return False
        if not is_adaptive(state, options):
            self._warn(state)
            return True
        if self._warm.get(parameter) is not state:  # remembered, because reading the step may wait for a GPU
            if float(_step(state, options) or 0.0) < _WARM_STEPS:
                return False
            self._warm[parameter] = state
        return True

    def _warn(self, state: dict[str, Any]) -> None:
        if not self._warned and "momentum_buffer" not in state:
            self._warned = True
            logger.warning(
                "gradient noise is measured without %s's own scaling, which EDL does not know; with an adaptive "
                "optimizer, use neither AdaScale nor an automatic batch",
                type(self._optimizer).__name__,
            )


def is_adaptive(state: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Return whether a parameter's (non-empty) optimizer state looks like that of Adam, RMSprop or Adagrad."""
    # Adadelta has a square_avg too, but divides by more than its root.
    return any(name in state for name in _MEANS) and "acc_delta" not in state and _step(state, options) is not None


def divisor_of(state: Mapping[str, Any], options: Mapping[str, Any]) -> Tensor | None:
    """Return the tensor by which an adaptive optimizer divides a gradient, or None for another kind of optimizer."""
    if not is_adaptive(state, options):
        return None
    # Factors that depend only on the number of steps are removed, so that estimates can be averaged over steps.
    step, eps = _step(state, options), options.get("eps", 0.0)
    found: Tensor
    if "exp_avg_sq" in state:
        found = state.get("max_exp_avg_sq", state["exp_avg_sq"])
        found = (found / (1 - options["betas"][1] ** step)).sqrt().add(eps)
    elif "square_avg" in state:
        found = state["square_avg"]
        if "grad_avg" in state:  # RMSprop, centered
            found = found.addcmul(state["grad_avg"], state["grad_avg"], value=-1).clamp_min(0)
        found = found.sqrt().add(eps) / (1 - options.get("alpha", 0.0) ** step) ** 0.5
    else:
        found = state["sum"].sqrt().add(eps) / step**0.5
    return found


def _step(state: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Return a parameter's step count, as a number or tensor; some optimizers count per group."""
    return state.get("step", options.get("step"))


_MEMORY_STEPS = 100.0  # fewer steps give too noisy an estimate; the noise itself changes only over epochs


@dataclass(frozen=True)
class GradientGroups:
    """Squared norms of the gradients in an optimizer step."""

    count: int  # groups with at least one sample, k
    samples: int  # samples in all groups, n
    weighted_square: float  # the sum of n_i |g_i|²
    square: float  # |g|², for the mean over all samples

    @property
    def usable(self) -> bool:
        """Whether the norms allow an estimate: there are at least two groups, and the gradients are finite."""
        return self.count > 1 and math.isfinite(self.weighted_square) and math.isfinite(self.square)

    def estimate(self) -> tuple[float, float]:
        """Return unbiased estimates of tr Σ and |G|²; the second may be below zero."""
        variance = max(self.weighted_square - self.samples * self.square, 0.0) / (self.count - 1)
        return variance, self.square - variance / self.samples


@dataclass
class GradientNoise:
    """Averages of the estimates over recent steps. Their ratio is used, since the average of ratios is biased."""

    variance: float = 0.0  # tr Σ, for a single sample's gradient
    square: float = 0.0  # |G|², for the true gradient
    steps: float = 0.0  # steps that the averages cover, at most 100

    def add_step(self, groups: GradientGroups) -> None:
        if not groups.usable:
            return
        variance, square = groups.estimate()
        self.steps = min(self.steps + 1.0, _MEMORY_STEPS)
        self.variance += (variance - self.variance) / self.steps
        self.square += (square - self.square) / self.steps

    @property
    def known(self) -> bool:
        return self.steps > 0

    @property
    def scale(self) -> float:
        """The noise scale tr(Σ)/|G|², in samples; infinite if the gradient cannot be told from the noise."""
        if self.square > 0:
            return max(self.variance, 0.0) / self.square
        return math.inf if self.variance > 0 else 0.0

    def gain(self, batch: int, base_batch: int) -> float:
        """Return how many steps with the base batch one step with `batch` samples is worth: 1 to batch/base_batch.

        This is the gain ratio of Johnson et al., "AdaScale SGD", ICML 2020: r = (σ² + μ²)/(σ²/S + μ²), where σ² =
        tr(Σ)/base_batch, μ² = |G|² and S = batch/base_batch.
        """
        square = max(self.square, 0.0)
        top, bottom = self.variance / base_batch + square, self.variance / batch + square
        return top / bottom if bottom > 0 else 1.0

    def state_dict(self) -> dict[str, float]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.variance = float(state["variance"])
        self.square = float(state["square"])
        self.steps = float(state["steps"])
