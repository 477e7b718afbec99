"""The callback that saves a Lightning `Trainer` between steps, and what it refuses."""

from __future__ import annotations

import importlib
import sys
from typing import Any, Final

from edl.collective.checkpoint.state.state import State
from edl.collective.lightning.hooks import CheckpointHooks
from edl.collective.lightning.logged import LoggedValues
from edl.collective.lightning.progress import LoopProgress, keeps_place
from edl.collective.loop_position import BoundaryCheckpointer
from edl.errors import SettingsError

__all__ = ["ElasticLightningCallback"]

# Both packages have the same code, and a Trainer of one takes callbacks of the other: import what the script did.
_PACKAGE: Final = "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
_lightning: Any = importlib.import_module(_PACKAGE)

_WRAPPED: Final = {
    "fit_loop": ("on_run_start", "on_run_end", "_load_combined_loader_states"),
    "epoch_loop": ("reset", "on_run_start", "advance"),
}
_REFUSED: Final = {
    "BatchSizeFinder": "set the batch size that it finds",
    "BaseFinetuning": "it adds parameters to the optimizer while training: give it all of them, and freeze by a hook",
    "GradientAccumulationScheduler": "use accumulate_grad_batches",
    "LearningRateFinder": "set the learning rate that it finds",
    "ModelPruning": "it changes which parameters there are",
    "StochasticWeightAveraging": "use WeightAveraging, which keeps its averages in the checkpoint",
}
_STRATEGIES: Final = {
    "DeepSpeedStrategy": "DeepSpeed keeps parameters where a State does not see them: use ddp or ModelParallelStrategy",
    "FSDPStrategy": "only FSDP1 itself can name its shards: use ModelParallelStrategy with fully_shard (FSDP2)",
}


class ElasticLightningCallback(_lightning.Callback):  # type: ignore[misc]
    """Saves a Lightning `Trainer`'s state between steps, and restores it when training begins.

    ::

        trainer = L.Trainer(..., callbacks=[ElasticLightningCallback()])
        trainer.fit(model, loader)

    It serves a single call of `fit`. Parameters, optimizers, schedules, the scaler, random numbers, the place in data,
    what was logged in the epoch so far, torchmetrics' metrics, and what other callbacks, the module and the data module
    put into checkpoints come back. A world of another size goes on if its steps train as many samples.
    """

    def __init__(self, **options: Any) -> None:
        """Give it to the `Trainer` among its `callbacks`.

        Args:
            **options: of the `Checkpointer`.
        """
        self._boundary = BoundaryCheckpointer(options)
        self._used = False
        self._inner: dict[tuple[str, str], Any] = {}
        self._progress: LoopProgress | None = None
        self._logged: LoggedValues | None = None
        self._hooks: CheckpointHooks | None = None
        self._resuming = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wrap the loops of a `Trainer` that is about to train.

        Raises:
            SettingsError: this version of Lightning, or something that was given to the trainer, does not allow going
                on exactly.
        """
        if stage != "fit":
            return
        if self._used:
            raise SettingsError("an ElasticLightningCallback serves one call of fit(): make another Trainer")
        self._used = True
        _check(trainer)
        self._progress = LoopProgress(trainer)
        self._logged = LoggedValues(trainer)
        self._hooks = CheckpointHooks(trainer, _lightning.__version__)
        loops = {"fit_loop": trainer.fit_loop, "epoch_loop": trainer.fit_loop.epoch_loop}
        wrappers = {
            ("fit_loop", "on_run_start"): self._begin_run,
            ("fit_loop", "on_run_end"): self._end_run,
            ("fit_loop", "_load_combined_loader_states"): self._note_draws,
            ("epoch_loop", "reset"): self._reset_epoch,
            ("epoch_loop", "on_run_start"): self._begin_epoch,
            ("epoch_loop", "advance"): self._train_batch,
        }
        for (loop, name), wrapper in wrappers.items():
            self._inner[loop, name] = getattr(loops[loop], name)
            setattr(loops[loop], name, wrapper)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Count the step, if the batch ended it."""
        assert self._progress is not None
        if self._progress.count_step():
            self._boundary.count_step()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let go of the memory, and leave the last saved state there."""
        self._boundary.close()

    def _note_draws(self) -> None:
        """Keep the random numbers that the first epoch's order may be drawn from, before its iterator is made."""
        self._inner["fit_loop", "_load_combined_loader_states"]()
        assert self._progress is not None
        if not self._resuming:  # a loader that is loaded anew in the epoch that is gone on with: they were restored
            self._progress.note_draws()

    def _begin_run(self) -> None:
        """Restore the newest state there is, before the hooks that tell that training begins."""
        progress = self._progress
        assert progress is not None
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
        assert progress is not None
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
        """Leave the counters of an epoch that is gone on with as they were restored."""
        if not self._resuming:
            self._inner["epoch_loop", "reset"]()

    def _begin_epoch(self, fetcher: Any) -> None:
        """Make the iterator of an epoch, behind the batches that were trained."""
        progress = self._progress
        assert progress is not None
        if self._resuming:
            self._resuming = False
            progress.read_on(fetcher, self._inner["epoch_loop", "on_run_start"])
            return
        progress.batches = 0
        if progress.makes_iterator():
            progress.note_draws()
        self._inner["epoch_loop", "on_run_start"](fetcher)

    def _train_batch(self, fetcher: Any) -> None:
        """Save the state after the last step, and train a batch."""
        progress, logged = self._progress, self._logged
        assert progress is not None
        assert logged is not None
        logged.apply()
        self._boundary.begin_step(progress.steps - 1)
        progress.batches += 1
        self._inner["epoch_loop", "advance"](fetcher)

    def _end_run(self) -> None:
        """Save the last state when all hooks that tell of the end have been called, and have it stored."""
        self._inner["fit_loop", "on_run_end"]()
        assert self._progress is not None
        if not self._progress.finished:
            self._progress.finished = True
            self._boundary.save_end(self._progress.steps - 1)
        self._boundary.close()


def _check(trainer: Any) -> None:
    """See that this trainer can go on exactly.

    Raises:
        SettingsError: it cannot.
    """
    loop = trainer.fit_loop
    loops = {"fit_loop": loop, "epoch_loop": getattr(loop, "epoch_loop", None)}
    if any(not hasattr(loops[name], method) for name, methods in _WRAPPED.items() for method in methods):
        raise SettingsError(
            f"ElasticLightningCallback does not know the loops of Lightning {_lightning.__version__}: use 2.6"
        )
    strategy = _named(trainer.strategy, _STRATEGIES)
    if strategy is not None:
        raise SettingsError(f"{strategy}: {_STRATEGIES[strategy]}")
    for callback in trainer.callbacks:
        name = _named(callback, _REFUSED)
        if name is not None:
            raise SettingsError(f"{name} cannot go on in the middle of training: {_REFUSED[name]}")
    if trainer.reload_dataloaders_every_n_epochs > 1:
        raise SettingsError(
            f"reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}: a restart in between "
            "would load them anew; 0 and 1 are supported"
        )


def _named(value: Any, names: dict[str, str]) -> str | None:
    """Which of the classes `names` this is an instance of; of either package, without importing it."""
    found = {base.__name__ for base in type(value).__mro__ if "lightning" in base.__module__}
    return next((name for name in names if name in found), None)
