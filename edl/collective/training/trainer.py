"""The optimizer step that does not depend on the world: a single process's update, computed by any number of ranks.

A step's gradient is the mean over the samples of a global batch, or a mean weighted by what the script says that a
sample weighs, such as its tokens. A rank cuts its share into as many micro-batches as its memory asks for. The mean
loss of a micro-batch of n of the batch's B samples is weighted W·n/B; then the mean over W ranks of what they
accumulate, which is what DDP computes, is the mean over the batch, however uneven shares are. Gradients are averaged
once a step: by DDP in the last micro-batch's backward, by `synchronize` for a plain module.

What does depend on how samples are grouped stays so: BatchNorm normalizes by the statistics of a micro-batch of a
rank. Its running statistics are a rank's own, and with DDP rank 0's everywhere. GroupNorm and LayerNorm have no
such dependence; SyncBatchNorm has it only between micro-batches. Modules with collectives in their forward pass
(SyncBatchNorm, FSDP) need the same number of micro-batches on every rank, and get it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from edl.collective.ranks import exchange
from edl.collective.training.gradients import (
    NoiseMeter,
    average_gradients,
    averages_itself,
    check_averaged,
    check_wrapping,
    fails_with_one_row,
    in_lockstep,
    is_sharded,
    least_rows,
    without_averaging,
)
from edl.collective.training.learning_rate import (
    AdaScale,
    Policy,
    RateScaling,
    SampleSchedule,
    SquareRoot,
    decay_for,
    epsilon_for,
    needs_noise,
)
from edl.collective.training.noise import GradientNoise
from edl.collective.training.sampler import ElasticSampler, count_rows, cut_rows, micro_batch_sizes
from edl.collective.training.step import (
    ONE_ROW,
    StepRequirements,
    TrainingStep,
    begin_counted_step,
    begin_sampled_step,
    weight_micro_batches,
)
from edl.collective.training.tuner import AutoBatch, BatchSizeTuner, RunState
from edl.errors import ProtocolError, SettingsError

__all__ = ["ElasticTrainer", "LossScale", "OptionScaling"]

logger = logging.getLogger("edl.collective")


class LossScale:
    """The scale of losses for an optimizer, and where a step is with it. Without a scaler the scale is 1.

    Args:
        scaler: of the user; None without mixed precision.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = scaler
        self._unscaled = False

    @property
    def factor(self) -> float:
        """The factor of losses."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss to take the gradient of."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the factor out of the optimizer's gradients, once a step."""
        if self._scaler is not None and not self._unscaled:
            self._unscaled = True  # even if it fails half-way: `discard_step` must undo it
            self._scaler.unscale_(optimizer)

    def step_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer.

        Returns:
            False if the scaler skipped the step because of infinite gradients.
        """
        if self._scaler is None:
            optimizer.step()
            return True
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        self._unscaled = False
        return self._scaler.get_scale() >= before

    def discard_step(self) -> None:
        """Be as before a step that was not made."""
        if self._scaler is not None and self._unscaled:
            self._scaler.update(self._scaler.get_scale())  # begin again with the same scale
            self._unscaled = False

    def state_dict(self) -> dict[str, Any] | None:
        """Return the scaler's state, None without a scaler."""
        return self._scaler.state_dict() if self._scaler is not None else None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from a saved state, if there is a scaler, and was when it was saved."""
        if self._scaler is not None and state is not None:
            self._scaler.load_state_dict(state)


class OptionScaling:
    """Scales the options of an optimizer for the time of a step: schedules and checkpoints see the user's.

    Args:
        optimizer: any of PyTorch's, or another whose parameter groups have `lr`.
        policy: decides whether more than the rate is scaled.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, policy: Policy) -> None:
        self._optimizer = optimizer
        self._moments = isinstance(policy, SquareRoot) and _scales_moments(optimizer, policy)
        self._warned = False
        if isinstance(policy, AdaScale) and _is_adaptive(optimizer):
            logger.warning(
                "AdaScale is derived for SGD (Johnson et al. 2020), where a step is the rate times the gradient; %s "
                "divides the gradient by its own scale, so its gain says little there: SquareRoot() is the rule for "
                "Adam and RMSprop",
                type(optimizer).__name__,
            )

    @contextmanager
    def apply(self, factor: float, scale: float) -> Iterator[None]:
        """Use other options for the block only."""
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
            new["eps"] = epsilon_for(group["eps"], scale)
        return new

    def _decay(self, decay: float, scale: float) -> float:
        new = decay_for(float(decay), scale)
        if new < 0 and not self._warned:
            self._warned = True
            logger.warning(
                "a batch of %.4g times the base batch is more than the square root rule is for: 1 - %g times that is "
                "above 1, and 0 is taken for the decay. Choose a larger base_batch, or SquareRoot(moments=False)",
                scale,
                decay,
            )
        return max(new, 0.0)


def _scales_moments(optimizer: torch.optim.Optimizer, policy: SquareRoot) -> bool:
    if policy.moments is not None:
        return policy.moments
    return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop))


def _is_adaptive(optimizer: torch.optim.Optimizer) -> bool:
    kinds = (torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta)
    return isinstance(optimizer, kinds) or any("betas" in group for group in optimizer.param_groups)


# --- The optimizer step that does not depend on the world ---


B = TypeVar("B")

_VERSION = 1  # of the state; another is refused


class ElasticTrainer:
    """Makes optimizer steps over global batches.

    ::

        trainer = ElasticTrainer(model, optimizer, sampler=sampler, max_micro_batch=64)
        for epoch in sampler.epochs(90):
            for batch in loader:
                for images, labels in trainer.micro_batches(batch):
                    loss = cross_entropy(model(images), labels)     # the mean over the micro-batch
                    trainer.backward(loss)
                trainer.step()

    Args:
        model: a module, also wrapped as a whole in `DistributedDataParallel` or by `fully_shard`: the wrapped module.
        optimizer: any of PyTorch's, of parameters of the model. If there are others that it does not have, their
            gradients are averaged, too, and left to you: step another optimizer between `synchronize` and `step`.
        sampler: where the batches come from; `step` advances it, and its global batch is the trainer's.
        global_batch: without a sampler, the samples that make a step over all ranks; how many really came is counted
            in every step, by a small exchange.
        base_batch: the global batch that the learning rate was chosen for; by default the batch that is asked for, so
            that a policy matters only once the batch has changed.
        max_micro_batch: samples that fit into this rank's memory at once; ranks may differ. None for no limit.
        policy: what the rate does when the batch is not the base batch, see `edl.collective.training.learning_rate`.
        auto: choose the global batch by itself, within these bounds; needs a policy that says what the rate does then.
        schedule: moved on by the samples trained, after every step.
        scaler: a `torch.amp.GradScaler`: losses are scaled, gradients unscaled before they are clipped.
        clip_norm: largest norm of the whole gradient of a step, of the optimizer's parameters.
        group: the process group of the ranks, torch's default group if None. With DDP it must be its own.

    Raises:
        SettingsError: arguments contradict each other, or gradients would not be averaged once over the ranks.
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
            raise SettingsError("auto changes the batch, policy says what the learning rate does then: pass one, too")
        asked = sampler.asked if sampler is not None else global_batch or 0
        micro_batch_sizes(1, max_micro_batch)  # refuses what cannot be
        self.model = model
        self.optimizer = optimizer
        self.sampler = sampler
        self.max_micro_batch = max_micro_batch
        self.clip_norm = clip_norm
        self.schedule = schedule
        self.noise = GradientNoise()
        self._scaling = RateScaling(policy, base_batch or asked, asked)
        self._options = OptionScaling(optimizer, policy)
        if auto is not None and sampler is not None and auto.most > sampler.length:
            raise SettingsError(f"auto goes up to {auto.most} samples, an epoch has {sampler.length}: lower its most")
        self._check_least_rows()
        self._scale = LossScale(scaler)
        self._group = group
        self._asked = asked
        measures = needs_noise(policy) or auto is not None
        check_wrapping(model, group, accumulates=measures or max_micro_batch is not None)
        self._parameters = list(model.parameters())
        check_averaged(self._updated(), self._parameters)
        self._meter: NoiseMeter | None = None
        if measures:
            if is_sharded(model):
                raise SettingsError("gradient noise of a sharded module cannot be measured: no AdaScale and no auto")
            self._meter = NoiseMeter([p for p in self._updated() if p.requires_grad], optimizer)
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
        """What the schedule is moved to, in samples; see `RateScaling.progress`."""
        return self._scaling.progress

    @property
    def global_batch(self) -> int:
        """Samples of the next step over all ranks, unless it is the last of an epoch."""
        return self.sampler.global_batch if self.sampler is not None else self._scaling.batch

    @property
    def rate_factor(self) -> float:
        """The factor of the optimizer's learning rates in the next step, by the policy."""
        return self._scaling.factor(self.noise)

    # --- One step. ---

    def micro_batches(
        self, batch: B, rows: int | None = None, *, weights: Tensor | Sequence[float] | None = None
    ) -> Iterator[B]:
        """Cut this rank's share of a global batch; call `backward` once for every micro-batch that comes.

        A rank without a sample of its own gets a micro-batch of a row all the same if its module needs a backward to
        take part. It weighs nothing, as long as its loss is finite.

        Args:
            batch: tensors, or a nest of them, with a row for every sample; see `edl.collective.training.step`.
            rows: without a sampler, how many of its rows count, all if None; 0 for a rank that has none but must have a
                batch. A sampler knows that by itself.
            weights: what the rows of the batch weigh in the mean loss, shape (rows,), such as how many of their tokens
                are no padding; on every rank, or on none. The ranks add them up, by a small exchange. Without them all
                rows weigh the same. The loss that `backward` gets is then the weighted mean over the micro-batch.

        Yields:
            Micro-batches, of the same structure as the batch.

        Raises:
            SettingsError: the batch is not the share that the sampler gave, the step before it was not finished, no
                rank has a sample, or the weights are no finite numbers from 0 on.
        """
        if self._step is not None:
            raise SettingsError("the step before was not finished: call step(), or discard() after an error")
        if self._tuner is not None and self._stepped_at is not None:
            self._tuner.record_wait(time.perf_counter() - self._stepped_at)
        self._stepped_at = None
        given = count_rows(batch)
        step = self._begin(given, rows)
        if weights is not None:
            weight_micro_batches(step, weights, given, self._group, self._device)
        self._step = step
        self._cuts = self._cut(batch, self._step)
        return self._cuts

    def _cut(self, batch: B, step: TrainingStep) -> Generator[B, None, None]:
        begin = 0
        for number, size in enumerate(step.sizes, 1):
            with without_averaging(self.model) if number < len(step.sizes) else nullcontext():
                step.due = size
                yield cut_rows(batch, begin, begin + size) if size else cut_rows(batch, 0, step.stand_in)
                if step.due is not None:
                    raise SettingsError("backward() was not called for a micro-batch")
            begin += size

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch.

        Args:
            loss: its mean over the micro-batch's rows, or over their `weights`; a scalar.

        Raises:
            SettingsError: no micro-batch is due, or a loss without weight is not finite.
        """
        step = self._step
        if step is None or step.due is None:
            raise SettingsError("backward() belongs into the loop over micro_batches(), once for each")
        rows = step.due_weight
        step.due = None
        step.begun = True
        if not rows and not bool(torch.isfinite(loss)):
            raise SettingsError(
                f"the loss of a micro-batch without weight is {float(loss)}: it takes part for no weight, and 0 times "
                "that is no number. A mean over no token is not finite: divide a sum by max(tokens, 1)"
            )
        weight = step.world * rows / step.samples
        scaled = self._scale.scale_loss(loss * weight)
        if self._meter is None:
            scaled.backward()  # type: ignore[no-untyped-call]
        else:
            with self._meter.micro_batch(rows, weight * self._scale.factor):
                scaled.backward()  # type: ignore[no-untyped-call]
        step.left -= 1

    def synchronize(self) -> None:
        """Average gradients over the whole global batch, on every rank, then unscale and clip them.

        `step` does this. Call it before only to look at the gradients, or to change them in the same way on all ranks.

        Raises:
            SettingsError: micro-batches of the step are left.
        """
        step = self._step
        if step is None or step.left:
            left = "no" if step is None else f"{step.left} of {len(step.sizes)}"
            raise SettingsError(f"{left} micro-batches are under way: go through micro_batches() before step()")
        if step.synchronized:
            return
        if step.world > 1 and not averages_itself(self.model):
            average_gradients([p for p in self._parameters if p.requires_grad], self._group)
        self._scale.unscale_gradients(self.optimizer)
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
        with self._options.apply(self.rate_factor, self._scaling.scale):
            updated = self._scale.step_optimizer(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        self._scaling.count_step(step.samples, self.noise)
        if self.sampler is not None:
            self.sampler.advance()
        self._step = self._cuts = None
        if self.schedule is not None and updated:
            self.schedule.move_to(self.progress)
        if self._tuner is not None:
            usual = step.samples == self._scaling.batch  # the last batch of an epoch takes another time
            seconds = time.perf_counter() - step.began_at if usual else None
            now = RunState(step.world, batch, self.max_micro_batch, self.noise)
            wanted = self._tuner.record_step(now, seconds, self._group, self._device)
            if wanted != batch:
                self.resize(wanted)
            self._stepped_at = time.perf_counter()

    def discard(self, *, retry: bool = False) -> None:
        """Drop a step that was begun, after an error. Every rank must do this, in the same step.

        With DDP none may have begun its last micro-batch unless all have, with FSDP all must have got equally far: a
        forward pass sends there, and a rank that did so alone stays out of step.

        The loader has moved on. So the step's samples are left out of this epoch, by all ranks alike, which a warning
        says; the next batch follows, and `samples` and schedules do not count what was not trained. With `retry`
        they are still due: give `micro_batches` the same batch again, after lowering `max_micro_batch` for instance.

        Nothing is left out where the sampler was restored or iterated over again since the step began: then the samples
        come again. Without a step under way only gradients are dropped.

        Args:
            retry: the same samples are to be trained again.

        Raises:
            SettingsError: FSDP keeps gradients of the step out of reach.
        """
        step = self._step
        self._drop_step()
        if step is None or retry or self.sampler is None or step.mark != self.sampler.mark:
            return
        self.sampler.advance()
        logger.warning("a step was discarded: %d samples are left out of epoch %d", step.samples, self.sampler.epoch)

    def _drop_step(self) -> None:
        """Drop the step under way."""
        step = self._step
        if step is not None and step.begun and step.left and is_sharded(self.model):
            raise SettingsError(
                "a step of a module sharded by fully_shard was broken off between two micro-batches, and FSDP cannot "
                "forget the gradients of the first: let the error end this worker, and go on from a saved state"
            )
        self._step = None
        cuts, self._cuts = self._cuts, None
        if cuts is not None:
            cuts.close()  # or it would keep DDP from averaging until an exception lets go of it
        self.model.zero_grad(set_to_none=True)
        self._scale.discard_step()
        if self._meter is not None:
            self._meter.discard_step()

    # --- The batch. ---

    def resize(self, global_batch: int) -> None:
        """Use another global batch, as soon as what the ranks' loaders have read ahead is trained.

        Every rank must call it after the same step. With a sampler the ranks agree on when by a small exchange.

        Args:
            global_batch: samples of a step.
        """
        if self.sampler is None:
            self._scaling.set_batch(global_batch, self.noise)
            return
        with self.sampler.hold() as handed:
            places = exchange([handed], self._group, self._device)
            self.sampler.resize(global_batch, at=max(place for (place,) in places))

    # --- State. ---

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive beside model, optimizer and sampler; the same on every rank."""
        return {
            "version": _VERSION,
            "asked": self._asked,
            "scaling": self._scaling.state_dict(),
            "noise": self.noise.state_dict(),
            "schedule": self.schedule.state_dict() if self.schedule is not None else None,
            "scaler": self._scale.state_dict(),
            "tuner": self._tuner.state_dict() if self._tuner is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, also in another world. Load the sampler's state as well.

        As with the sampler, a `global_batch` argument other than the saved run's holds from here on.

        Args:
            state: what `state_dict` returned, on any rank of any world.

        Raises:
            ProtocolError: it is of another version of EDL.
        """
        if state.get("version") != _VERSION:
            raise ProtocolError(f"a trainer's state of version {state.get('version')!r}: this EDL reads {_VERSION}")
        self._drop_step()
        self._scaling.load_state_dict(state["scaling"])
        self.noise.load_state_dict(state["noise"])
        if self.sampler is None and state["asked"] != self._asked:
            self._scaling.set_batch(self._asked, self.noise)
        self._scale.load_state_dict(state["scaler"])
        for part, saved in ((self.schedule, state["schedule"]), (self._tuner, state["tuner"])):
            if part is not None and saved is not None:
                part.load_state_dict(saved)

    # --- Inside. ---

    @property
    def _device(self) -> torch.device:
        return self._parameters[0].device

    def _updated(self) -> list[Tensor]:
        """Return the optimizer's parameters."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _check_least_rows(self) -> None:
        """Let no rank, and no micro-batch, have a single row where the model normalizes over rows.

        Raises:
            SettingsError: some would all the same.
        """
        self._least = least_rows(self.model)
        self._strict = fails_with_one_row(self.model)
        if self.sampler is not None:
            self.sampler.require_rows(self._least)
        if not self._strict:
            return
        if self.max_micro_batch is not None and self.max_micro_batch < 3:  # three rows are cut into two and one
            raise SettingsError(f"max_micro_batch={self.max_micro_batch}: some would be of one row, and {ONE_ROW}")
        sampler = self.sampler
        if sampler is not None and (
            sampler.asked == 1 or (sampler.tail == "keep" and sampler.length % sampler.asked == 1)
        ):
            raise SettingsError(
                f"of {sampler.length} samples in batches of {sampler.asked} the last batch of an epoch has one, "
                f"and {ONE_ROW}. "
                'Choose ElasticSampler(tail="drop") or tail="pad", or another global_batch'
            )

    def _begin(self, given: int, rows: int | None) -> TrainingStep:
        parts = 2 if self._meter is not None else 1
        lockstep = in_lockstep(self.model)
        how = StepRequirements(
            self.max_micro_batch, parts, averages_itself(self.model), lockstep, self._least, self._strict
        )
        if self.sampler is None:
            return begin_counted_step(given, given if rows is None else rows, how, self._group, self._device)
        self._scaling.set_batch(self.sampler.global_batch, self.noise)
        return begin_sampled_step(given, rows, self.sampler, how, self._group, self._device)
