"""Training under `edl run` with Hugging Face's Accelerate, which leaves the loop to the script."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Final

import accelerate
import torch
from torch.utils.data import DataLoader, IterableDataset

from edl.collective.checkpoint.state.fields import parameter_names
from edl.collective.checkpoint.state.loaders import capture_random_states, restore_random_states
from edl.collective.checkpoint.state.state import State
from edl.collective.integrations import loop_position
from edl.errors import SettingsError


class ElasticLoop:
    """Save the objects that an `Accelerator` has prepared, between steps, and resume at the batch after the last save.

    ::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        loop = ElasticLoop(accelerator)
        for epoch in loop.epochs(3):
            for batch in loop.batches(loader):
                ...

    A step ends with the batch after which Accelerate synchronizes gradients.
    """

    def __init__(self, accelerator: accelerate.Accelerator, **options: Any) -> None:
        """Attach to an accelerator.

        Args:
            accelerator: The accelerator. It must have prepared everything by the time `epochs` begins.
            **options: Options of the `Checkpointer`.

        Raises:
            SettingsError: The accelerator keeps parameters where a `State` cannot name them.
        """
        kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
        if kind in ("DEEPSPEED", "MEGATRON_LM"):
            raise SettingsError(f"{kind} keeps parameters where a State cannot see them: use DDP or FSDP2")
        if kind == "FSDP" and not getattr(accelerator, "is_fsdp2", False):
            raise SettingsError("FSDP1 is not supported, as only FSDP1 can name its own shards: use fsdp_version=2")
        self._accelerator: Any = accelerator
        self._boundary = loop_position.BoundaryCheckpointer(options)
        self._place = _Place(accelerator)
        self._used = self._read = self._resuming = False

    def epochs(self, count: int) -> Iterator[int]:
        """Restore the newest state, if there is one, and iterate over the remaining epochs.

        After the last epoch, the state is saved and stored. If you leave the loop earlier, the state that was saved
        last remains.

        Args:
            count: Total number of epochs, including those already trained.

        Yields:
            The number of the epoch, from 0.

        Raises:
            SettingsError: This was called before, the saved state does not fit, the job has already ended after fewer
                epochs, or the script did not call `batches` in a resumed epoch.
        """
        if self._used:
            raise SettingsError("an ElasticLoop serves one loop over epochs: use another Accelerator in another script")
        self._used = True
        place = self._place
        try:
            self._resuming = self._boundary.open(State(**self._fields()))
            if place.finished and place.epoch < count:
                raise SettingsError(
                    f"this job has ended after {place.epoch} epochs, but epochs({count}) requests more: the random "
                    "numbers for the order of more epochs were not kept. Start another job from the model that this "
                    "one saved"
                )
            while place.epoch < count and not place.finished:
                self._read = False
                yield place.epoch
                if self._resuming:
                    raise SettingsError(
                        f"epoch {place.epoch} resumes after its first {place.batches} batches, but the script did not "
                        "call batches() in it: read the rest with batches(), or leave the loop over epochs with break"
                    )
                place.epoch += 1
                place.batches = 0
            if not place.finished:
                place.finished = True
                self._boundary.save_end(place.steps - 1)
        finally:
            self._boundary.close()

    def batches(self, loader: Any) -> Iterator[Any]:
        """Iterate over the remaining batches of an epoch, and save the state between steps.

        Args:
            loader: A loader that the accelerator prepared, or `edl.distill.torch.distill` around one. Call this once in
                every epoch.

        Yields:
            A batch, unchanged.

        Raises:
            SettingsError: This was called outside of `epochs` or twice in an epoch, or the order or size of batches has
                changed.
        """
        if not self._boundary.is_open or self._read:
            raise SettingsError("call ElasticLoop.batches() once in each epoch, in the loop over ElasticLoop.epochs()")
        self._read = True
        place = self._place
        label = getattr(loader, "label", None)  # set by `distill`, which labels what is left of the epoch
        prepared = loader if label is None else loader.loader
        iterator = self._go_on(prepared) if self._resuming else self._begin(prepared)
        iterator = iterator if label is None else label(iterator)
        self._resuming = False
        while True:
            self._boundary.begin_step(place.steps - 1)
            try:
                batch = next(iterator)
            except StopIteration:
                break
            place.batches += 1
            yield batch
            if self._accelerator.sync_gradients:
                place.steps += 1
                self._boundary.count_step()
        if hasattr(prepared, "iteration"):
            prepared.iteration = place.iteration + 1  # not counted by the loader if no batches were left

    def _begin(self, loader: Any) -> Iterator[Any]:
        self._place.begin(loader)
        return iter(loader)

    def _go_on(self, loader: Any) -> Iterator[Any]:
        place = self._place
        place.go_on(loader)
        iterator: Iterator[Any] = iter(loader)
        if not place.batches:
            return iterator
        base = getattr(loader, "base_dataloader", loader)
        skips = isinstance(base, DataLoader) and not isinstance(base.dataset, IterableDataset)
        # With a dispatcher, rank 0 reads for all, several batches at a time, so trained batches are read again.
        skips = skips and not isinstance(loader, accelerate.data_loader.DataLoaderDispatcher)
        # A prepared loader starts iterating over its base loader only when it is asked for its first batch.
        with loop_position.skipping(base, place.batches) if skips else nullcontext():
            first = [batch for _, batch in zip(range(1 if skips else place.batches + 1), iterator, strict=False)]
        return itertools.chain(first if skips else first[place.batches :], iterator)

    def _fields(self) -> dict[str, Any]:
        accelerator = self._accelerator
        fields: dict[str, Any] = {f"model_{number}": model for number, model in enumerate(accelerator._models)}
        for number, optimizer in enumerate(accelerator._optimizers):
            fields[f"optimizer_{number}"] = getattr(optimizer, "optimizer", optimizer)
        for number, scheduler in enumerate(accelerator._schedulers):
            fields[f"lr_scheduler_{number}"] = getattr(scheduler, "scheduler", scheduler)
        for number, custom in enumerate(accelerator._custom_objects):
            fields[f"registered_{number}"] = custom
        if accelerator.scaler is not None:
            fields["scaler"] = accelerator.scaler
        fields["place"] = self._place
        _check_models(fields)
        return fields


def _check_models(fields: dict[str, Any]) -> None:
    known = parameter_names(fields.items())
    for value in fields.values():
        if not isinstance(value, torch.optim.Optimizer):
            continue
        lacking = [p for group in value.param_groups for p in group["params"] if id(p) not in known]
        if lacking:
            raise SettingsError(
                f"{type(value).__name__} changes {len(lacking)} parameters, one of shape {tuple(lacking[0].shape)}, "
                "that no model prepared by the accelerator contains: they would be lost with a worker. Pass the model, "
                "an nn.Module, to accelerator.prepare() or to register_for_checkpointing()"
            )


_SAVED: Final = (
    *("epoch", "batches", "steps", "iteration", "finished"),
    *("accumulated", "draws", "order", "samples"),  # what the order and size of batches depend on
)


class _Place:
    """A loop's position, which is the same on all ranks: a field of the `State`."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.epoch = self.batches = self.steps = self.iteration = 0
        self.finished = False
        self.draws: dict[str, Any] = {}
        self.order: dict[str, Any] = {}
        self.samples = 0
        self.accumulated = 1
        self._loader: Any = None

    def state_dict(self) -> dict[str, Any]:
        loaders = self._accelerator._dataloaders
        workers = [loop_position.has_workers(loader) and loader is not self._loader for loader in loaders]
        own = {name: getattr(self, name) for name in _SAVED}
        return own | {"accumulation": self._accelerator.step, "workers": workers}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        # The loader's settings are compared later, when the script passes the loader.
        for name in _SAVED:
            setattr(self, name, saved[name])
        self._accelerator.step = saved["accumulation"]
        for loader, made in zip(self._accelerator._dataloaders, saved["workers"], strict=False):
            if made and not loop_position.has_workers(loader):
                loop_position.make_workers_without_a_draw(loader)

    def begin(self, loader: Any) -> None:
        self.order, self.samples, self.accumulated = self._describe(loader)
        self.iteration = getattr(loader, "iteration", 0)
        self._loader = loader
        generator = _generator_of(loader)
        own = generator.get_state() if generator is not None else None
        self.draws = {
            "numbers": capture_random_states(),
            "generator": own,
            "workers": loop_position.has_workers(loader),
        }

    def go_on(self, loader: Any) -> None:
        order, samples, accumulated = self._describe(loader)
        loop_position.check_samples(
            self.samples,
            samples,
            self._accelerator.num_processes,
            "Set gradient_accumulation_steps by WORLD_SIZE so that batch_size * gradient_accumulation_steps * "
            "WORLD_SIZE stays the same",
        )
        loop_position.check_order(self.order, order)
        if accumulated != self.accumulated:
            if self.batches % self.accumulated and not self._accelerator.gradient_state.sync_with_dataloader:
                raise SettingsError(
                    "sync_with_dataloader=False: a step continues across epochs, which requires the saved "
                    f"gradient_accumulation_steps={self.accumulated}: restore it, or change sync_with_dataloader"
                )
            # An epoch's last step may be a short one. It is followed by no batches, however they are counted.
            self.batches = -(-self.batches // self.accumulated) * accumulated
            self._accelerator.step = 0  # this counts batches, and the next one begins a step
        self.accumulated = accumulated
        self._loader = loader
        if self.draws["workers"]:
            loop_position.make_workers_without_a_draw(loader)
        if hasattr(loader, "iteration"):
            loader.iteration = self.iteration
        restore_random_states(self.draws["numbers"])
        generator = _generator_of(loader)
        if generator is not None and self.draws["generator"] is not None:
            generator.set_state(self.draws["generator"])

    def _describe(self, loader: Any) -> tuple[dict[str, Any], int, int]:
        """Return the order of the data, the number of samples in a step, and the number of batches in a step."""
        alone = self._accelerator.num_processes == 1
        drawn = alone or getattr(loader, "synchronized_generator", None) is not None
        order = loop_position.order_of(loader, redrawn=drawn)
        if order["sampler"] == "RandomSampler":  # Accelerate draws the order differently for another world size
            order["workers"] = self._accelerator.num_processes
        batches = int(self._accelerator.gradient_accumulation_steps)
        size = getattr(loader, "total_batch_size", None) if isinstance(loader, DataLoader) else None
        return order, (size if size is not None else self._accelerator.num_processes) * batches, batches


def _generator_of(loader: Any) -> Any:
    sampler = getattr(loader, "sampler", None)
    found = [getattr(loader, "synchronized_generator", None), getattr(loader, "generator", None)]
    return next((value for value in [*found, getattr(sampler, "generator", None)] if value is not None), None)
