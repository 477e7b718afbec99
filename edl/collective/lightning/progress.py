"""Where Lightning's loops are, and how they are brought there again."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from edl.collective.checkpoint.state.fields import capture_random_states, is_stateful_loader, restore_random_states
from edl.collective.loop_position import (
    check_order,
    check_samples,
    has_workers,
    make_workers_without_a_draw,
    order_of,
    skipping,
)

__all__ = ["Draws", "LoopProgress", "keeps_place"]


def keeps_place(loader: Any) -> bool:
    """Whether the loader says itself where it is. Without a length it is read a batch ahead, and does not."""
    return is_stateful_loader(loader) and not isinstance(loader.dataset, IterableDataset)


class Draws:
    """Random numbers as they were before the epoch's iterator was made: a local field of the `State`."""

    def __init__(self) -> None:
        self.numbers: dict[str, Any] = {}
        self.own: list[torch.Tensor | None] = []
        self.workers: list[bool] = []
        """Of each loader, whether workers that persist had been made before: their seed was drawn before `numbers`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the global generators and of the loaders' own, and which loaders had workers."""
        return {"numbers": self.numbers, "own": self.own, "workers": self.workers}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take them."""
        self.numbers = saved["numbers"]
        self.own = saved["own"]
        self.workers = saved["workers"]


class LoopProgress:
    """How far a Lightning `Trainer` has come, the same on all ranks: a field of the `State`."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.steps = self.batches = 0
        self.finished = False
        self.draws = Draws()
        self._stepped_before = 0
        self._saved: dict[str, Any] = {}

    @property
    def loaders(self) -> list[Any]:
        """The loaders that are read, in order."""
        return list(self.trainer.fit_loop._combined_loader.flattened)

    def count_step(self) -> bool:
        """Count a step, if the batch that ends now ended it; by hand, if an optimizer made a step in it."""
        loop = self.trainer.fit_loop.epoch_loop
        if self.trainer.lightning_module.automatic_optimization:
            stepped = not loop._should_accumulate()
        else:
            now = loop.manual_optimization.optim_step_progress.total.completed
            stepped, self._stepped_before = now != self._stepped_before, now
        self.steps += stepped
        return bool(stepped)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, what the order and size of batches depend on, and what the trainer remembers."""
        trainer = self.trainer
        loops = trainer.fit_loop.state_dict()
        loops["state_dict"] = {}  # of it a loader's own place, which is another field
        connector = trainer._logger_connector
        return {
            "steps": self.steps,
            "batches": self.batches,
            "finished": self.finished,
            "stepped_before": self._stepped_before,
            "loops": loops,
            "order": self._order(),
            "world": trainer.world_size,
            "accumulate": trainer.accumulate_grad_batches,
            "samples": self._samples(),
            "should_stop": trainer.should_stop,
            "validation_workers": self._validation_workers(),
            "callback_metrics": dict(connector._callback_metrics),
            "logged_metrics": dict(connector._logged_metrics),
            "progress_bar_metrics": dict(connector._progress_bar_metrics),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take the position; `apply` goes there.

        Raises:
            SettingsError: a step trains another number of samples now, or the order of the data is another.
        """
        trainer = self.trainer
        here = self._samples()
        for before, now in zip(saved["samples"], here, strict=False):
            check_samples(
                before,
                now,
                trainer.world_size,
                "Set accumulate_grad_batches by WORLD_SIZE so that batch_size * accumulate_grad_batches * WORLD_SIZE "
                "stays the same",
            )
        check_order(saved["order"], self._order())
        self._saved = saved

    def apply(self) -> None:
        """Have the loops go on where the state was saved."""
        trainer, saved = self.trainer, self._saved
        fit_loop = trainer.fit_loop
        fit_loop.load_state_dict(saved["loops"])
        for loop in (fit_loop, fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop):
            loop.on_iteration_done()  # it is no restart by Lightning's own rules
        for loop in (fit_loop.epoch_loop.automatic_optimization, fit_loop.epoch_loop.manual_optimization):
            loop.on_iteration_done()
        self.steps = saved["steps"]
        self.batches = saved["batches"]
        self.finished = saved["finished"]
        self._stepped_before = saved["stepped_before"]
        self._scale(saved["accumulate"], trainer.accumulate_grad_batches)
        trainer.should_stop = saved["should_stop"]
        connector = trainer._logger_connector
        device = trainer.strategy.root_device
        connector._callback_metrics = _on(device, saved["callback_metrics"])
        connector._logged_metrics = _on(device, saved["logged_metrics"])
        connector._progress_bar_metrics = dict(saved["progress_bar_metrics"])
        if not self.finished:
            fit_loop._restart_stage = "restarted_mid_epoch"  # hooks of the epoch's begin have been called

    def keep_validation_workers(self) -> None:
        """Have validation's loaders whose workers persist, and were made before the restart, draw no other seed."""
        workers, trainer = self._saved["validation_workers"], self.trainer
        if not any(workers):
            return
        trainer.validating = True  # whose loaders are meant, as in Lightning's own loop
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        trainer.training = True
        for loader, made in zip(self._validation_loaders(), workers, strict=False):
            if made and not has_workers(loader):
                make_workers_without_a_draw(loader)

    def _validation_loaders(self) -> list[Any]:
        combined = self.trainer.fit_loop.epoch_loop.val_loop._combined_loader
        return [] if combined is None else list(combined.flattened)

    def _validation_workers(self) -> list[bool]:
        """Return whether the loaders of validation have workers that serve the next validation, too."""
        trainer = self.trainer
        loaded_in = trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch
        serve = not trainer.reload_dataloaders_every_n_epochs or loaded_in == trainer.current_epoch
        return [serve and has_workers(loader) for loader in self._validation_loaders()]

    def _scale(self, before: int, now: int) -> None:
        """Count batches as this world does, which makes a step of another number of them."""
        if before == now:
            return
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        for tracker in (progress.total, progress.current):
            for name, count in vars(tracker).items():
                setattr(tracker, name, count // before * now)
        self.batches = self.batches // before * now

    def makes_iterator(self) -> bool:
        """Whether Lightning makes another iterator at the beginning of this epoch."""
        fit_loop = self.trainer.fit_loop
        return self.trainer.current_epoch > 0 and not fit_loop.is_resuming and not fit_loop.epoch_loop.restarting

    def note_draws(self) -> None:
        """Keep the random numbers that the order of the epoch that begins may be drawn from."""
        self.draws.numbers = capture_random_states()
        self.draws.own = [None if found is None else found.get_state() for found in self._generators()]
        self.draws.workers = [has_workers(loader) for loader in self.loaders]

    def read_on(self, fetcher: Any, begin: Any) -> None:
        """Make the iterator of an epoch that was broken off, behind the batches that were trained."""
        fit_loop, loaders = self.trainer.fit_loop, self.loaders
        fit_loop._combined_loader.reset()  # the iterator of epoch 0, and its worker processes
        if self.draws.numbers:
            restore_random_states(self.draws.numbers)
            for generator, numbers in zip(self._generators(), self.draws.own, strict=False):
                if generator is not None and numbers is not None:
                    generator.set_state(numbers)
        for loader, made in zip(self.loaders, self.draws.workers, strict=False):
            if made and not keeps_place(loader):
                make_workers_without_a_draw(loader)
        loader = loaders[0]
        if all(map(keeps_place, loaders)):
            iter(fetcher)
            self._count_read(fetcher)
        elif len(loaders) == 1 and isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            with skipping(loader, self.batches):
                iter(fetcher)
            self._count_read(fetcher)
        else:
            iter(fetcher)
            for _ in range(self.batches):
                next(fetcher)
        # Lightning's method adds the batches that were counted, and makes no iterator where it resumes.
        fetcher.fetched -= fit_loop.epoch_loop.batch_progress.current.ready
        fit_loop._resuming_from_checkpoint = True
        begin(fetcher)

    def _count_read(self, fetcher: Any) -> None:
        fetcher.fetched = self.batches
        fetcher.combined_loader._iterator._idx = self.batches

    def _generators(self) -> list[Any]:
        """Return the generators that belong to the loaders or their samplers."""
        found: list[Any] = []
        for loader in self.loaders:
            sampler = getattr(loader, "sampler", None)
            found += [getattr(loader, "generator", None), getattr(sampler, "generator", None)]
        return [value if isinstance(value, torch.Generator) else None for value in found]

    def _order(self) -> list[dict[str, Any]]:
        redrawn = self.trainer.world_size == 1  # where each rank draws by itself, what a lost one drew is lost
        return [order_of(loader, redrawn=redrawn) for loader in self.loaders]

    def _samples(self) -> list[int]:
        """Return the samples that a step trains, by loader; for a batch of unknown size the number of ranks."""
        factor = self.trainer.accumulate_grad_batches * self.trainer.world_size
        sizes = [getattr(loader, "batch_size", None) for loader in self.loaders]
        return [size * factor if size is not None else self.trainer.world_size for size in sizes]


def _on(device: torch.device, metrics: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in metrics.items()}
