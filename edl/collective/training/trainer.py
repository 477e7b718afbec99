"""An optimizer step independent of the world size: any number of ranks update a model as a single process would.

A step's gradient is the mean over the samples of a global batch, optionally weighted per sample. A rank cuts its share
into micro-batches that fit into the rank's memory. If a micro-batch has n of the batch's B samples and there are W
ranks, its mean loss is multiplied by W·n/B. The mean over the ranks of the accumulated gradients, which is what DDP
computes, is then the mean over the batch, however uneven the shares are. Gradients are averaged once per step.

The result still depends on the grouping of samples if a layer's output depends on the grouping. BatchNorm normalizes by
the statistics of one micro-batch on one rank; SyncBatchNorm depends only on how a step is split into micro-batches.
Modules with collectives in their forward pass (SyncBatchNorm, FSDP) need equally many micro-batches on all ranks, and
get them.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from edl.collective.ranks import exchange
from edl.collective.training import gradients
from edl.collective.training.learning_rate import AdaScale, Policy, RateScaling, SampleSchedule, SquareRoot
from edl.collective.training.sampler import ElasticSampler, cut_rows, micro_batch_sizes
from edl.collective.training.step import ONE_ROW, StepRequirements, TrainingStep, begin_step
from edl.collective.training.tuner import AutoBatch, BatchSizeTuner
from edl.errors import ProtocolError, SettingsError
from edl.quoting import quote

logger = logging.getLogger("edl.collective")


class OptionScaling:
    """Scales an optimizer's options during a step only, so that schedules and checkpoints see the user's values."""

    def __init__(self, optimizer: torch.optim.Optimizer, policy: Policy) -> None:
        self._optimizer = optimizer
        scaled = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop))
        self._moments = isinstance(policy, SquareRoot) and (scaled if policy.moments is None else policy.moments)
        self._warned = False
        kinds = (torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta)
        adaptive = isinstance(optimizer, kinds) or any("betas" in group for group in optimizer.param_groups)
        if isinstance(policy, AdaScale) and adaptive:
            logger.warning(
                "AdaScale is derived for SGD (Johnson et al. 2020), where a step is the rate times the gradient; %s "
                "divides the gradient by its own scale, so the gain says little: use SquareRoot() for Adam and "
                "RMSprop",
                type(optimizer).__name__,
            )

    @contextmanager
    def apply(self, factor: float, scale: float) -> Iterator[None]:
        """Scale options in the block: multiply the rate by `factor`; fit decays and epsilon to `scale` base batches."""
        groups = self._optimizer.param_groups
        changed = [self._scaled(group, factor, scale) for group in groups]
        before = [{name: group[name] for name in new} for group, new in zip(groups, changed, strict=True)]
        try:
            for group, new in zip(groups, changed, strict=True):
                group.update(new)
            yield
        finally:
            for group, old in zip(groups, before, strict=True):
                group.update(old)

    def _scaled(self, group: dict[str, Any], factor: float, scale: float) -> dict[str, Any]:
        new: dict[str, Any] = {"lr": group["lr"] * factor} if factor != 1.0 else {}
        if not self._moments or scale == 1.0:
            return new
        if "betas" in group:
            new["betas"] = tuple(self._decay(beta, scale) for beta in group["betas"])
        if "alpha" in group:
            new["alpha"] = self._decay(group["alpha"], scale)
        if "eps" in group:
            new["eps"] = group["eps"] / math.sqrt(scale)  # as the root of the second moment shrinks, if mostly noise
        return new

    def _decay(self, decay: float, scale: float) -> float:
        new = 1 - scale * (1 - float(decay))  # the average reaches back over as many samples as before
        if new < 0 and not self._warned:
            self._warned = True
            logger.warning(
                "a batch of %.4g times the base batch is too large for the square root rule: the decay %g would "
                "become negative, so it is 0. Choose a larger base_batch, or SquareRoot(moments=False)",
                scale,
                decay,
            )
        return max(new, 0.0)


B = TypeVar("B")

_VERSION = 1  # of the saved state; any other version is refused


class ElasticTrainer:
    """Make optimizer steps over global batches, with the same result for any number of ranks.

    ::

        trainer = ElasticTrainer(model, optimizer, sampler=sampler, max_micro_batch=64)
        for epoch in sampler.epochs(90):
            for batch in loader:
                for images, labels in trainer.micro_batches(batch):
                    loss = cross_entropy(model(images), labels)     # the mean over the micro-batch
                    trainer.backward(loss)
                trainer.step()

    Args:
        model: The module to train. If you wrapped the whole module in `DistributedDataParallel` or with `fully_shard`,
            pass the wrapped module.
        optimizer: Any PyTorch optimizer of the model's parameters, if its `step` needs no closure. Gradients of other
            parameters are averaged too, but you must apply them: step another optimizer between `synchronize` and
            `step`.
        sampler: Source of the batches. `step` advances the sampler, and the trainer uses the sampler's global batch.
        global_batch: Samples per step over all ranks, if there is no sampler. In every step, the ranks count the actual
            number by a small exchange.
        base_batch: Global batch, in samples, that the learning rate was chosen for. The default is the batch that you
            asked for, so that a policy has an effect only after the batch changes.
        max_micro_batch: Samples that fit into this rank's memory at once; None for no limit. Ranks may differ.
        policy: How the learning rate changes when the batch is not the base batch; see
            `edl.collective.training.learning_rate`.
        auto: Bounds within which the trainer chooses the global batch itself. Requires a policy.
        schedule: Learning rate schedule, advanced after every step to the trainer's `progress`.
        scaler: A `torch.amp.GradScaler` for mixed precision. Losses are scaled, and gradients unscaled before they are
            clipped.
        clip_norm: Largest norm of a step's gradient over all of the optimizer's parameters; None for no clipping.
        group: Process group of the ranks, torch's default group if None. With DDP, it must be the group that DDP uses.

    Raises:
        SettingsError: Arguments contradict each other, the optimizer needs a closure, a parameter of a lazy module has
            no shape yet, or gradients would not be averaged exactly once over the ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        sampler: ElasticSampler | None = None,
        global_batch: int | None = None,
        base_batch: int | None = None,
        max_micro_batch: int | None = None,
        policy: Policy = None,
        auto: AutoBatch | None = None,
        schedule: SampleSchedule | None = None,
        scaler: torch.amp.GradScaler | None = None,
        clip_norm: float | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if (sampler is None) == (global_batch is None):
            raise SettingsError("pass either sampler, which has a global batch, or global_batch")
        if auto is not None and policy is None:
            raise SettingsError("auto changes the batch, so the learning rate needs a policy: pass policy= too")
        asked = sampler.asked if sampler is not None else global_batch or 0
        if clip_norm is not None and not clip_norm > 0:
            raise SettingsError(f"clip_norm={clip_norm}: must be above 0, or None for no clipping")
        micro_batch_sizes(1, max_micro_batch)  # raises if max_micro_batch is invalid
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise SettingsError(
                f"{type(optimizer).__name__} needs a closure, to compute the loss several times in a step, but a step "
                "here computes it once, in micro-batches: use another optimizer, such as SGD or AdamW"
            )
        gradients.check_materialized(model)
        self.model = model
        self.optimizer = optimizer
        self.sampler = sampler
        self.max_micro_batch = max_micro_batch
        self.clip_norm = clip_norm
        self.schedule = schedule
        self.noise = gradients.GradientNoise()
        self._scaling = RateScaling(policy, base_batch or asked, asked)
        self._options = OptionScaling(optimizer, policy)
        if auto is not None and sampler is not None and auto.most > sampler.length:
            raise SettingsError(f"auto allows {auto.most} samples, but an epoch has {sampler.length}: lower auto.most")
        self._check_least_rows()
        self._scaler = scaler or torch.amp.GradScaler(enabled=False)  # does nothing
        self._group = group
        self._asked = asked
        measures = isinstance(policy, AdaScale) or auto is not None
        gradients.check_wrapping(model, group, accumulates=measures or max_micro_batch is not None)
        self._parameters = list(model.parameters())
        gradients.check_averaged(self._updated(), self._parameters)
        self._meter: gradients.NoiseMeter | None = None
        if measures:
            if gradients.is_sharded(model):
                raise SettingsError("gradient noise of a sharded module cannot be measured: omit AdaScale and auto")
            self._meter = gradients.NoiseMeter([p for p in self._updated() if p.requires_grad], optimizer)
        self._tuner = BatchSizeTuner(auto, base_batch or asked) if auto is not None else None
        self._step: TrainingStep | None = None
        self._stepped_at: float | None = None
        self._cuts: Generator[Any, None, None] | None = None

    @property
    def samples(self) -> int:
        """Samples trained so far, over all ranks and epochs."""
        return self._scaling.samples

    @property
    def progress(self) -> float:
        """Position of the schedule, in samples; see `RateScaling.progress`."""
        return self._scaling.progress

    @property
    def global_batch(self) -> int:
        """Samples in the next step over all ranks, unless that step is the last of an epoch."""
        return self.sampler.global_batch if self.sampler is not None else self._scaling.batch

    @property
    def rate_factor(self) -> float:
        """The factor by which the policy multiplies the optimizer's learning rates in the next step."""
        return self._scaling.factor(self.noise)

    def micro_batches(
        self, batch: B, rows: int | None = None, *, weights: Tensor | Sequence[float] | None = None
    ) -> Iterator[B]:
        """Cut this rank's share of a global batch into micro-batches; call `backward` once for each.

        If the module needs a backward pass on every rank, a rank without a sample still gets a micro-batch with the
        fewest rows that the module accepts. This micro-batch has no weight, but its loss must be finite.

        Args:
            batch: Tensors, or a nest of them, with one row per sample; see `edl.collective.training.sampler`.
            rows: Without a sampler, how many of the batch's rows count; None if all of them count. Pass 0 on a rank
                that has no sample but must have a batch.
            weights: Weight of each row of the batch in the mean loss, such as its number of tokens without padding;
                shape (rows of the batch,). Pass weights on every rank or on none. The loss that you pass to `backward`
                must then be the weighted mean over the micro-batch.

        Yields:
            Micro-batches, with the same structure as the batch.

        Raises:
            SettingsError: The batch is not the share that the sampler gave, the previous step was not finished, no rank
                has a sample, or the weights are not finite, non-negative numbers.
        """
        if self._step is not None:
            raise SettingsError("the previous step was not finished: call step(), or discard() after an error")
        if self.sampler is not None:
            self._scaling.set_batch(self.sampler.global_batch, self.noise)
        how = StepRequirements(
            most=self.max_micro_batch,
            parts=2 if self._meter is not None else 1,
            all_backward=gradients.averages_itself(self.model),
            lockstep=gradients.in_lockstep(self.model),
            least=self._least,
            strict=self._strict,
        )
        self._step = begin_step(batch, rows, weights, self.sampler, how, self._group, self._device)
        self._cuts = self._cut(batch, self._step)
        return self._cuts

    def _cut(self, batch: B, step: TrainingStep) -> Generator[B, None, None]:
        begin = 0
        for number, size in enumerate(step.sizes, 1):
            with gradients.without_averaging(self.model) if number < len(step.sizes) else nullcontext():
                step.due = size
                yield cut_rows(batch, begin, begin + size) if size else cut_rows(batch, 0, step.stand_in)
                if step.due is not None:
                    raise SettingsError("backward() was not called for a micro-batch")
            begin += size

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch.

        Args:
            loss: Mean loss over the micro-batch's rows, weighted by their `weights` if you passed any; a scalar.

        Raises:
            SettingsError: No micro-batch is due, the loss is not a single number, or the loss of a micro-batch without
                weight is not finite.
        """
        step = self._step
        if step is None or step.due is None:
            raise SettingsError("call backward() in the loop over micro_batches(), once for each")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"has the shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"is {quote(loss)}"
            raise SettingsError(f"the loss {what}: it must be a tensor with one number, such as losses.mean()")
        rows = step.due_weight
        step.due = None
        step.begun = True
        if not rows and not bool(torch.isfinite(loss)):
            raise SettingsError(
                f"the loss of a micro-batch without weight is {float(loss)}: its weight is 0, and 0 times that is NaN. "
                "The mean over zero tokens is not finite: divide the sum by max(tokens, 1)"
            )
        weight = step.world * rows / step.samples
        scaled = self._scaler.scale(loss * weight)
        if self._meter is None:
            scaled.backward()  # type: ignore[no-untyped-call]
        else:
            with self._meter.micro_batch(rows, weight * self._scaler.get_scale()):
                scaled.backward()  # type: ignore[no-untyped-call]
        step.left -= 1

    def synchronize(self) -> None:
        """Average gradients over the whole global batch, on every rank, then unscale and clip them.

        `step` does this. Call it yourself only to read the gradients, or to change them in the same way on all ranks.

        Raises:
            SettingsError: `backward` was not called for all micro-batches of the step.
        """
        step = self._step
        if step is None or step.left:
            left = "no" if step is None else f"{step.left} of {len(step.sizes)}"
            raise SettingsError(f"{left} micro-batches are in progress: finish micro_batches() before step()")
        if step.synchronized:
            return
        if step.world > 1 and not gradients.averages_itself(self.model):
            gradients.average_gradients([p for p in self._parameters if p.requires_grad], self._group)
        if not step.unscaled:
            step.unscaled = True  # set even if unscaling fails half-way: `discard` must undo it
            self._scaler.unscale_(self.optimizer)
        if self._meter is not None:
            self.noise.add_step(self._meter.finish_step(step.samples, self._group, step.world))
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._updated(), self.clip_norm)
        step.synchronized = True

    def step(self) -> None:
        """Update the parameters, drop the optimizer's gradients, and count the samples as trained."""
        self.synchronize()
        step = self._step
        assert step is not None
        batch = self.global_batch
        loss_scale = self._scaler.get_scale()
        with self._options.apply(self.rate_factor, self._scaling.scale):
            self._scaler.step(self.optimizer)
        self._scaler.update()
        updated = self._scaler.get_scale() >= loss_scale  # not after infinite or NaN gradients
        self.optimizer.zero_grad(set_to_none=True)
        self._scaling.count_step(step.samples, self.noise)
        if self.sampler is not None:
            self.sampler.advance()
        self._step = self._cuts = None
        if self.schedule is not None and updated:
            self.schedule.move_to(self.progress)
        if self._tuner is not None:
            usual = step.samples == self._scaling.batch  # an epoch's smaller last batch would distort the times
            seconds = time.perf_counter() - (self._stepped_at or step.began_at) if usual else None
            wanted = self._tuner.record_step(
                step.world, batch, self.max_micro_batch, self.noise, seconds, self._group, self._device
            )
            if wanted != batch:
                self.resize(wanted)
            self._stepped_at = time.perf_counter()

    def discard(self, *, retry: bool = False) -> None:
        """Drop the current step after an error. Every rank must do this, in the same step.

        With DDP, either all ranks or none of the ranks must have begun their last micro-batch. With FSDP, all ranks
        must have reached the same point. The passes involved communicate, and a rank that ran such a pass alone would
        stay out of step with the others.

        Because the loader has already moved on, all ranks leave the step's samples out of this epoch, and a warning
        says so. With `retry`, the samples are still due: pass the same batch to `micro_batches` again. No samples are
        left out if the sampler has been restored or iterated over again since the step began.

        Args:
            retry: Whether you will train the same samples again.

        Raises:
            SettingsError: FSDP holds gradients from the step that cannot be dropped.
        """
        step = self._step
        self._drop_step()
        if step is None or retry or self.sampler is None or step.mark != self.sampler.mark:
            return
        self.sampler.advance()
        logger.warning("a step was discarded: %d samples are left out of epoch %d", step.samples, self.sampler.epoch)

    def _drop_step(self) -> None:
        step = self._step
        if step is not None and step.begun and step.left and gradients.is_sharded(self.model):
            raise SettingsError(
                "a step of a module sharded by fully_shard was interrupted between two micro-batches, and FSDP cannot "
                "drop the gradients of the first: let the error end this worker, and resume from a saved state"
            )
        self._step = self._stepped_at = None
        cuts, self._cuts = self._cuts, None
        if cuts is not None:
            cuts.close()  # or DDP would not average until the exception that refers to the generator is freed
        self.model.zero_grad(set_to_none=True)
        if step is not None and step.unscaled:
            self._scaler.update(self._scaler.get_scale())  # forget the unscaling, keep the scale
        if self._meter is not None:
            self._meter.discard_step()

    def resize(self, global_batch: int) -> None:
        """Change the global batch once the ranks have trained on the batches that their loaders have read ahead.

        Every rank must call this after the same step.

        Args:
            global_batch: Samples per step, over all ranks.
        """
        if self.sampler is None:
            self._scaling.set_batch(global_batch, self.noise)
            return
        with self.sampler.hold() as handed:
            places = exchange([handed], self._group, self._device)
            self.sampler.resize(global_batch, at=max(place for (place,) in places))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides model, optimizer and sampler. It is the same on every rank."""
        return {
            "version": _VERSION,
            "asked": self._asked,
            "scaling": self._scaling.state_dict(),
            "noise": self.noise.state_dict(),
            "schedule": self.schedule.state_dict() if self.schedule is not None else None,
            "scaler": self._scaler.state_dict() or None,
            "tuner": self._tuner.state_dict() if self._tuner is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, in a world of any size. Load the sampler's state as well.

        If this trainer's `global_batch` argument differs from the argument in the saved run, the new argument applies
        from here on.

        Args:
            state: A state that `state_dict` returned, on any rank of any world.

        Raises:
            ProtocolError: The state was saved by another version of EDL.
        """
        if state.get("version") != _VERSION:
            raise ProtocolError(f"the trainer's state has version {state.get('version')!r}: this EDL reads {_VERSION}")
        self._drop_step()
        self._scaling.load_state_dict(state["scaling"])
        self.noise.load_state_dict(state["noise"])
        if self.sampler is None and state["asked"] != self._asked:
            self._scaling.set_batch(self._asked, self.noise)
        if state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])
        for part, saved in ((self.schedule, state["schedule"]), (self._tuner, state["tuner"])):
            if part is not None and saved is not None:
                part.load_state_dict(saved)

    @property
    def _device(self) -> torch.device:
        return self._parameters[0].device

    def _updated(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _check_least_rows(self) -> None:
        """Make sure that no rank and no micro-batch has a single row if the model normalizes over rows."""
        self._least = gradients.least_rows(self.model)
        self._strict = gradients.fails_with_one_row(self.model)
        if self.sampler is not None:
            self.sampler.require_rows(self._least)
        if not self._strict:
            return
        if self.max_micro_batch is not None and self.max_micro_batch < 3:  # with 2, three rows become two and one
            raise SettingsError(
                f"max_micro_batch={self.max_micro_batch}: some micro-batches would have one row, and {ONE_ROW}"
            )
        sampler = self.sampler
        if sampler is not None and (
            sampler.asked == 1 or (sampler.tail == "keep" and sampler.length % sampler.asked == 1)
        ):
            raise SettingsError(
                f"with {sampler.length} samples in batches of {sampler.asked}, an epoch's last batch has one row, "
                f"and {ONE_ROW}. "
                'Choose ElasticSampler(tail="drop") or tail="pad", or a different global_batch'
            )
