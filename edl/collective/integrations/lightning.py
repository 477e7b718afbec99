"""Lightning's `Trainer` under `edl run`: `ElasticLightningCallback`.

Lightning's own checkpoints resume at the first batch of an epoch, lack the values logged in that epoch, and follow
their own rules for hooks at the start and end of the epoch. So Lightning is not told about the restart. Instead, its
loops are set to the saved position, and the methods that deal with this position are wrapped. A state is saved before a
batch is read, so that random numbers that the dataset draws in this process are restored too.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from edl.collective.checkpoint.state.loaders import capture_random_states, is_stateful_loader, restore_random_states
from edl.collective.checkpoint.state.state import State
from edl.collective.integrations import loop_position
from edl.errors import SettingsError


class CheckpointHooks:
    """A `State` field that contains what other callbacks, the module and the data module add to checkpoints."""

    def __init__(self, trainer: Any, version: str) -> None:
        self._trainer = trainer
        self._version = version
        # Their folder has a logger's version, which a restart changes, and the best checkpoint is in the first folder.
        self._derived = [callback for callback in trainer.callbacks if getattr(callback, "dirpath", "") is None]

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        checkpoint = self._checkpoint()
        given = dict(checkpoint)
        for callback in trainer.callbacks:
            callback.on_save_checkpoint(trainer, trainer.lightning_module, checkpoint)
        trainer.lightning_module.on_save_checkpoint(checkpoint)
        return {
            "callbacks": {callback.state_key: callback.state_dict() for callback in trainer.callbacks},
            "added": {key: value for key, value in checkpoint.items() if value is not given.get(key, self)},
            "data": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer = self._trainer
        checkpoint = {**self._checkpoint(), **saved["added"]}
        trainer.lightning_module.on_load_checkpoint(checkpoint)
        if trainer.datamodule is not None and saved["data"]:
            trainer.datamodule.load_state_dict(saved["data"])
        for callback in trainer.callbacks:
            callback.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
        for callback in trainer.callbacks:
            state = saved["callbacks"].get(callback.state_key)
            if state:
                if any(callback is derived for derived in self._derived):
                    callback.dirpath = state["dirpath"]
                callback.load_state_dict(state)

    def _checkpoint(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": self._version,
            "state_dict": trainer.lightning_module.state_dict(),
            "loops": {"fit_loop": trainer.fit_loop.state_dict()},
        }


# --- Values from `self.log` and torchmetrics that accumulate in an epoch ---


class LoggedValues:
    """Values that this rank has logged so far in the epoch: a local field of the `State`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        connector = trainer._logger_connector
        return {
            "first": connector._first_loop_iter,
            "hook": connector._current_fx,
            "results": {key: _pack_result(result) for key, result in trainer.fit_loop.epoch_loop._results.items()},
            "metrics": {name: _pack_metric(metric) for name, metric in self._metrics()},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Hold the values until a batch begins: they already include what hooks log or reset before that."""
        self._saved = saved

    def apply(self) -> None:
        if self._saved is None:
            return
        saved, self._saved = self._saved, None
        trainer = self._trainer
        connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
        connector._first_loop_iter = saved["first"]
        connector._current_fx = saved["hook"]
        metrics = dict(self._metrics())
        for name, packed in saved["metrics"].items():
            if name in metrics:
                _unpack_metric(metrics[name], packed)
        module = sys.modules[type(results).__module__]
        results.clear()
        for key, packed in saved["results"].items():
            results[key] = _unpack_result(module, trainer, packed, metrics)

    def _metrics(self) -> list[tuple[str, Any]]:
        module: nn.Module = self._trainer.lightning_module
        return [
            (name, child)
            for name, child in module.named_modules()
            if hasattr(child, "_defaults") and hasattr(child, "compute")
        ]


_META: Final = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")


def _pack_result(result: Any) -> dict[str, Any]:
    meta = result.meta
    if meta.sync.group is not None:
        raise SettingsError(f"self.log({meta.name!r}, sync_dist_group=...) cannot be restored: remove the group")
    return {
        "meta": {name: getattr(meta, name) for name in _META},
        "dataloader_idx": meta.dataloader_idx,
        "attribute": meta.metric_attribute,
        "reduce": meta.reduce_fx.__name__,
        "sync": (meta.sync.should, meta.sync.rank_zero_only, meta.sync.op),
        "is_tensor": result.is_tensor,
        "has_reset": result.has_reset,
        "value": result.value if result.is_tensor else None,
        "rows": getattr(result, "cumulated_batch_size", None),
        "last": result._forward_cache,
        "updates": result._update_count,
    }


def _unpack_result(module: Any, trainer: Any, packed: dict[str, Any], metrics: dict[str, Any]) -> Any:
    meta = module._Metadata(
        **packed["meta"],
        reduce_fx=packed["reduce"],
        dataloader_idx=packed["dataloader_idx"],
        metric_attribute=packed["attribute"],
    )
    should, rank_zero_only, operation = packed["sync"]
    meta.sync = module._Sync(
        _should=should, fn=trainer.strategy.reduce, _op=operation, _group=None, rank_zero_only=rank_zero_only
    )
    result = module._ResultMetric(meta, packed["is_tensor"])
    result.value = packed["value"] if packed["is_tensor"] else metrics.get(packed["attribute"])
    if packed["rows"] is not None:
        result.cumulated_batch_size = packed["rows"]
    result.has_reset = packed["has_reset"]
    result._forward_cache = packed["last"]
    result._update_count = packed["updates"]
    return result.to(trainer.strategy.root_device)


def _pack_metric(metric: Any) -> dict[str, Any]:
    """Return the state of a torchmetrics metric. The metric's `state_dict` lacks most of it."""
    return {"state": {name: getattr(metric, name) for name in metric._defaults}, "updates": metric._update_count}


def _unpack_metric(metric: Any, packed: dict[str, Any]) -> None:
    for name, value in packed["state"].items():
        moved = [item.to(metric.device) for item in value] if isinstance(value, list) else value.to(metric.device)
        setattr(metric, name, moved)
    metric._update_count = packed["updates"]
    metric._computed = None


def keeps_place(loader: Any) -> bool:
    """Return whether the loader knows its position. A loader without a length does not: it is read a batch ahead."""
    return is_stateful_loader(loader) and not isinstance(loader.dataset, IterableDataset)


class Draws:
    """Random numbers from before the epoch's iterator was made: a local field of the `State`."""

    def __init__(self) -> None:
        self.numbers: dict[str, Any] = {}
        self.own: list[torch.Tensor | None] = []
        self.workers: list[bool] = []  # by loader: whether persistent workers' seed was drawn before `numbers`

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self).update(saved)


class LoopProgress:
    """Position of a Lightning `Trainer`, the same on all ranks: a field of the `State`."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.steps = self.batches = 0
        self.finished = False
        self.draws = Draws()
        self._stepped_before = 0
        self._saved: dict[str, Any] = {}

    @property
    def loaders(self) -> list[Any]:
        return list(self.trainer.fit_loop._combined_loader.flattened)

    def count_step(self) -> bool:
        """Return whether this batch ends a step (in manual optimization: an optimizer stepped), and count that step."""
        loop = self.trainer.fit_loop.epoch_loop
        if self.trainer.lightning_module.automatic_optimization:
            stepped = not loop._should_accumulate()
        else:
            now = loop.manual_optimization.optim_step_progress.total.completed
            stepped, self._stepped_before = now != self._stepped_before, now
        self.steps += stepped
        return bool(stepped)

    def state_dict(self) -> dict[str, Any]:
        trainer = self.trainer
        loops = trainer.fit_loop.state_dict()
        loops["state_dict"] = {}  # left out: the loaders' own positions, which are other fields
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
        trainer = self.trainer
        here = self._samples()
        for before, now in zip(saved["samples"], here, strict=False):
            loop_position.check_samples(
                before,
                now,
                trainer.world_size,
                "Set accumulate_grad_batches by WORLD_SIZE so that batch_size * accumulate_grad_batches * WORLD_SIZE "
                "stays the same",
            )
        loop_position.check_order(saved["order"], self._order())
        self._saved = saved

    def apply(self) -> None:
        trainer, saved = self.trainer, self._saved
        fit_loop = trainer.fit_loop
        fit_loop.load_state_dict(saved["loops"])
        for loop in (fit_loop, fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop):
            loop.on_iteration_done()  # so that Lightning does not apply its own rules for restarts
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
            fit_loop._restart_stage = "restarted_mid_epoch"  # the hooks for the epoch's start were already called

    def keep_validation_workers(self) -> None:
        """Prevent validation loaders that had persistent workers before the restart from drawing another seed."""
        workers, trainer = self._saved["validation_workers"], self.trainer
        if not any(workers):
            return
        trainer.validating = True  # selects the loaders that are set up, as in Lightning's own loop
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        trainer.training = True
        for loader, made in zip(self._validation_loaders(), workers, strict=False):
            if made and not loop_position.has_workers(loader):
                loop_position.make_workers_without_a_draw(loader)

    def _validation_loaders(self) -> list[Any]:
        combined = self.trainer.fit_loop.epoch_loop.val_loop._combined_loader
        return [] if combined is None else list(combined.flattened)

    def _validation_workers(self) -> list[bool]:
        """Return, for each validation loader, whether it has workers that will also serve the next validation."""
        trainer = self.trainer
        loaded_in = trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch
        serve = not trainer.reload_dataloaders_every_n_epochs or loaded_in == trainer.current_epoch
        return [serve and loop_position.has_workers(loader) for loader in self._validation_loaders()]

    def _scale(self, before: int, now: int) -> None:
        """Convert counts of batches to this world, in which a step has a different number of batches."""
        if before == now:
            return
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        for tracker in (progress.total, progress.current):
            for name, count in vars(tracker).items():
                setattr(tracker, name, count // before * now)
        self.batches = self.batches // before * now

    def makes_iterator(self) -> bool:
        """Return whether Lightning makes another iterator at the beginning of this epoch."""
        fit_loop = self.trainer.fit_loop
        return self.trainer.current_epoch > 0 and not fit_loop.is_resuming and not fit_loop.epoch_loop.restarting

    def note_draws(self) -> None:
        """Remember the random number states from which the order of the epoch that begins may be drawn."""
        self.draws.numbers = capture_random_states()
        self.draws.own = [None if found is None else found.get_state() for found in self._generators()]
        self.draws.workers = [loop_position.has_workers(loader) for loader in self.loaders]

    def read_on(self, fetcher: Any, begin: Any) -> None:
        """Make the iterator of an interrupted epoch, beginning after the batches that were trained."""
        fit_loop, loaders = self.trainer.fit_loop, self.loaders
        fit_loop._combined_loader.reset()  # drops the iterator of epoch 0, and its worker processes
        if self.draws.numbers:
            restore_random_states(self.draws.numbers)
            for generator, numbers in zip(self._generators(), self.draws.own, strict=False):
                if generator is not None and numbers is not None:
                    generator.set_state(numbers)
        for loader, made in zip(self.loaders, self.draws.workers, strict=False):
            if made and not keeps_place(loader):
                loop_position.make_workers_without_a_draw(loader)
        loader = loaders[0]
        if all(map(keeps_place, loaders)):
            iter(fetcher)
            self._count_read(fetcher)
        elif len(loaders) == 1 and isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            with loop_position.skipping(loader, self.batches):
                iter(fetcher)
            self._count_read(fetcher)
        else:
            iter(fetcher)
            for _ in range(self.batches):
                next(fetcher)
        # Lightning's method adds the batches that were counted, and makes no iterator when it resumes.
        fetcher.fetched -= fit_loop.epoch_loop.batch_progress.current.ready
        fit_loop._resuming_from_checkpoint = True
        begin(fetcher)

    def _count_read(self, fetcher: Any) -> None:
        fetcher.fetched = self.batches
        fetcher.combined_loader._iterator._idx = self.batches

    def _generators(self) -> list[Any]:
        found: list[Any] = []
        for loader in self.loaders:
            sampler = getattr(loader, "sampler", None)
            found += [getattr(loader, "generator", None), getattr(sampler, "generator", None)]
        return [value if isinstance(value, torch.Generator) else None for value in found]

    def _order(self) -> list[dict[str, Any]]:
        redrawn = self.trainer.world_size == 1  # with several ranks, the draws of a lost rank are lost
        return [loop_position.order_of(loader, redrawn=redrawn) for loader in self.loaders]

    def _samples(self) -> list[int]:
        """Return the number of samples in a step, by loader; if the batch size is unknown, the number of ranks."""
        factor = self.trainer.accumulate_grad_batches * self.trainer.world_size
        sizes = [getattr(loader, "batch_size", None) for loader in self.loaders]
        return [size * factor if size is not None else self.trainer.world_size for size in sizes]


def _on(device: torch.device, metrics: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in metrics.items()}


# Both packages have the same code, and a Trainer of one accepts callbacks of the other: use what the script imported.
_PACKAGE: Final = "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
_lightning: Any = importlib.import_module(_PACKAGE)

# Methods of the callback, by the loop and the method that they wrap
_WRAPPERS: Final = {
    ("fit_loop", "on_run_start"): "_begin_run",
    ("fit_loop", "on_run_end"): "_end_run",
    ("fit_loop", "_load_combined_loader_states"): "_note_draws",
    ("epoch_loop", "reset"): "_reset_epoch",
    ("epoch_loop", "on_run_start"): "_begin_epoch",
    ("epoch_loop", "advance"): "_train_batch",
}
_REFUSED: Final = {
    "BatchSizeFinder": "set the batch size that it finds",
    "BaseFinetuning": "it adds parameters later: give the optimizer all parameters, and freeze in a hook",
    "GradientAccumulationScheduler": "use accumulate_grad_batches",
    "LearningRateFinder": "set the learning rate that it finds",
    "ModelPruning": "it changes the set of parameters",
    "StochasticWeightAveraging": "use WeightAveraging, which keeps its averages in the checkpoint",
}
_STRATEGIES: Final = {
    "DeepSpeedStrategy": "DeepSpeed keeps parameters where a State cannot see them: use ddp or ModelParallelStrategy",
    "FSDPStrategy": "only FSDP1 itself can name its shards: use ModelParallelStrategy with fully_shard (FSDP2)",
}


class ElasticLightningCallback(_lightning.Callback):  # type: ignore[misc]
    """Save a Lightning `Trainer`'s state between steps, and restore it when training begins.

    ::

        trainer = L.Trainer(..., callbacks=[ElasticLightningCallback()])
        trainer.fit(model, loader)

    A callback serves a single call of `fit`. A world of another size can resume if its steps train the same number of
    samples.
    """

    _progress: LoopProgress  # these exist from `setup` on
    _logged: LoggedValues
    _hooks: CheckpointHooks

    def __init__(self, **options: Any) -> None:
        """Create a callback, to pass to the `Trainer` among its `callbacks`.

        Args:
            **options: Options of the `Checkpointer`.
        """
        self._boundary = loop_position.BoundaryCheckpointer(options)
        self._used = False
        self._inner: dict[tuple[str, str], Any] = {}
        self._resuming = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wrap the loops of a `Trainer` that is about to train.

        Raises:
            SettingsError: This version of Lightning, or something that was passed to the trainer, does not allow an
                exact resume.
        """
        if stage != "fit":
            return
        if self._used:
            raise SettingsError("an ElasticLightningCallback serves one call of fit(): create another Trainer")
        self._used = True
        _check(trainer)
        self._progress = LoopProgress(trainer)
        self._logged = LoggedValues(trainer)
        self._hooks = CheckpointHooks(trainer, _lightning.__version__)
        loops = _loops_of(trainer)
        for (loop, name), wrapper in _WRAPPERS.items():
            self._inner[loop, name] = getattr(loops[loop], name)
            setattr(loops[loop], name, getattr(self, wrapper))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        if self._progress.count_step():
            self._boundary.count_step()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Release the memory; the last saved state stays."""
        self._boundary.close()

    def _note_draws(self) -> None:
        self._inner["fit_loop", "_load_combined_loader_states"]()
        if not self._resuming:  # when an epoch resumes, a loader may be loaded again, but its numbers were restored
            self._progress.note_draws()

    def _begin_run(self) -> None:
        """Restore the newest state, if there is one, before the hooks for the start of training are called."""
        progress = self._progress
        state = State(local=["draws", "logged"], **self._fields())
        if self._boundary.open(state):
            progress.apply()
            self._resuming = not progress.finished
            self._inner["fit_loop", "on_run_start"]()
            progress.keep_validation_workers()
            return
        self._inner["fit_loop", "on_run_start"]()

    def _fields(self) -> dict[str, Any]:
        progress = self._progress
        trainer = progress.trainer
        fields: dict[str, Any] = {"model": trainer.lightning_module}
        for number, optimizer in enumerate(trainer.optimizers):
            fields[f"optimizer_{number}"] = optimizer
        for number, config in enumerate(trainer.lr_scheduler_configs):
            fields[f"lr_scheduler_{number}"] = config.scheduler
        if trainer.precision_plugin.state_dict():
            fields["precision"] = trainer.precision_plugin
        for number, loader in enumerate(progress.loaders):
            if keeps_place(loader):
                fields[f"loader_{number}"] = loader
        fields["progress"] = progress
        fields["hooks"] = self._hooks
        fields["draws"] = progress.draws
        fields["logged"] = self._logged
        return fields

    def _reset_epoch(self) -> None:
        if not self._resuming:
            self._inner["epoch_loop", "reset"]()

    def _begin_epoch(self, fetcher: Any) -> None:
        progress = self._progress
        if self._resuming:
            self._resuming = False
            progress.read_on(fetcher, self._inner["epoch_loop", "on_run_start"])
            return
        progress.batches = 0
        if progress.makes_iterator():
            progress.note_draws()
        self._inner["epoch_loop", "on_run_start"](fetcher)

    def _train_batch(self, fetcher: Any) -> None:
        self._logged.apply()
        self._boundary.begin_step(self._progress.steps - 1)
        self._progress.batches += 1
        self._inner["epoch_loop", "advance"](fetcher)

    def _end_run(self) -> None:
        """Save and store the last state, after all hooks for the end of training were called."""
        self._inner["fit_loop", "on_run_end"]()
        if not self._progress.finished:
            self._progress.finished = True
            self._boundary.save_end(self._progress.steps - 1)
        self._boundary.close()


def _loops_of(trainer: Any) -> dict[str, Any]:
    return {"fit_loop": trainer.fit_loop, "epoch_loop": getattr(trainer.fit_loop, "epoch_loop", None)}


def _check(trainer: Any) -> None:
    loops = _loops_of(trainer)
    if any(not hasattr(loops[loop], method) for loop, method in _WRAPPERS):
        raise SettingsError(
            f"ElasticLightningCallback does not support the loops of Lightning {_lightning.__version__}: use 2.6"
        )
    strategy = _named(trainer.strategy, _STRATEGIES)
    if strategy is not None:
        raise SettingsError(f"{strategy}: {_STRATEGIES[strategy]}")
    for callback in trainer.callbacks:
        name = _named(callback, _REFUSED)
        if name is not None:
            raise SettingsError(f"{name} cannot resume in the middle of training: {_REFUSED[name]}")
    if trainer.reload_dataloaders_every_n_epochs > 1:
        raise SettingsError(
            f"reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}: a restart in between "
            "would load them again; 0 and 1 are supported"
        )


def _named(value: Any, names: dict[str, str]) -> str | None:
    """Return which class in `names` the value is an instance of, in either package, without importing the package."""
    found = {base.__name__ for base in type(value).__mro__ if "lightning" in base.__module__}
    return next((name for name in names if name in found), None)
