"""Hugging Face's `Trainer` under `edl run`: a callback that keeps the whole state in memory and resumes from it.

The Trainer reads its position only from files, before the model and the optimizer are prepared. So the callback wraps
the two methods that handle the position.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
import transformers

from edl.collective.checkpoint.state.state import State
from edl.collective.integrations import loop_position
from edl.errors import SettingsError

_NO_FOLDER: Final = "/dev/null/no-folder"  # a checkpoint without files, so the Trainer only skips trained batches
_POSITION: Final = frozenset({"epochs_trained", "steps_trained_in_current_epoch", "resume_from_checkpoint", "epoch"})
_RESTORED: Final = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)


class ElasticCallback(transformers.TrainerCallback):
    """Save a `Trainer`'s state between steps, and restore it when training begins.

    ::

        trainer = Trainer(model=model, args=args, train_dataset=dataset)
        trainer.add_callback(ElasticCallback(trainer))
        trainer.train()

    A callback serves a single call of `train`. A world of another size can resume if its steps train the same number of
    samples.
    """

    def __init__(self, trainer: Any, **options: Any) -> None:
        """Attach to a `Trainer`, to which you must also add the callback.

        Args:
            trainer: The `transformers.Trainer`, whose `train` is called once after this.
            **options: Options of the `Checkpointer`.

        Raises:
            SettingsError: This version of transformers, or an argument of the trainer, does not allow an exact resume.
        """
        known = inspect.signature(getattr(trainer, "_run_epoch", lambda: None)).parameters
        if _POSITION - known.keys():
            raise SettingsError(
                f"ElasticCallback does not support the Trainer of transformers {transformers.__version__}: use 5.23"
            )
        if trainer.args.ignore_data_skip:
            raise SettingsError("ignore_data_skip=True would train samples again after a restart: remove it")
        if trainer.is_deepspeed_enabled:
            raise SettingsError("DeepSpeed keeps parameters where a State cannot see them: use DDP or FSDP2")
        # A weak reference: a trainer in a cycle exists until the garbage collector finds it, which ends its loaders'
        # workers in an order that makes each of them time out after 5 s.
        self._trainer = weakref.proxy(trainer)
        self._boundary = loop_position.BoundaryCheckpointer(options)
        self._used = self._restored = False
        self._begin = (0, 0)
        self._evaluates_on_start = trainer.args.eval_on_start
        self._progress = _Progress(self._trainer)
        self._init_training_state = _method_of(trainer, "_init_training_state")
        trainer._init_training_state = self._find_beginning
        self._run_epoch = _method_of(trainer, "_run_epoch")
        trainer._run_epoch = self._train_epoch
        self._get_eval_dataloader = _method_of(trainer, "get_eval_dataloader")
        trainer.get_eval_dataloader = self._find_eval_dataloader

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._used:
            raise SettingsError("an ElasticCallback serves one call of train(): use another Trainer in another script")
        self._used = True
        trainer, optimizer = self._trainer, kwargs["optimizer"]
        self._progress.order = loop_position.order_of(kwargs["train_dataloader"])
        fields = {
            "model": kwargs["model"],
            "optimizer": getattr(optimizer, "optimizer", optimizer),
            "lr_scheduler": kwargs["lr_scheduler"],
            "progress": self._progress,
            "losses": _Losses(trainer, self._progress),
        }
        if trainer.accelerator.scaler is not None:
            fields["scaler"] = trainer.accelerator.scaler
        if self._boundary.open(State(local=["losses"], **fields)):
            self._restored = True
            self._begin = self._progress.epoch, self._progress.updates
            loop_position.make_workers_without_a_draw(kwargs["train_dataloader"])
            control.should_training_stop = self._progress.finished
            args.eval_on_start = False  # it was done before the first step that was saved

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the user's arguments, once training has begun."""
        args.eval_on_start = self._evaluates_on_start

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the state after the last step, and pause if the agent asks for a pause."""
        self._restored = False
        self._boundary.begin_step(state.global_step - 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._boundary.count_step()
        self._progress.updates += 1

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._progress.finished:
            self._progress.finished = True
            self._boundary.save_end(state.global_step - 1)
        self._boundary.close()

    def _find_beginning(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Remember the position in the Trainer's own checkpoint, and make the Trainer iterate over all epochs."""
        epochs, batches = self._init_training_state(*args, **kwargs)
        self._begin = epochs, batches // self._trainer.args.gradient_accumulation_steps
        return 0, 0

    def _find_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the Trainer's loader for an evaluation, whose persistent workers may have to be created again."""
        loader = self._get_eval_dataloader(eval_dataset)
        name = eval_dataset if isinstance(eval_dataset, str) else "eval"
        if name in self._progress.used_loaders:
            self._progress.used_loaders.remove(name)
            loop_position.make_workers_without_a_draw(loader)
        return loader

    def _train_epoch(self, **kwargs: Any) -> None:
        epoch, (first, updates) = kwargs["epoch"], self._begin
        if self._progress.finished or epoch < first:
            return
        self._progress.epoch = epoch
        self._progress.updates = updates if epoch == first else 0
        if self._restored:
            kwargs["resume_from_checkpoint"] = _NO_FOLDER if epoch == first and updates else None
        kwargs["epochs_trained"] = first
        kwargs["steps_trained_in_current_epoch"] = updates * self._trainer.args.gradient_accumulation_steps
        self._run_epoch(**kwargs)


def _method_of(trainer: Any, name: str) -> Callable[..., Any]:
    """Return a method as it is now, without keeping the trainer alive."""
    method: Callable[..., Any] = getattr(trainer, name)
    if getattr(method, "__self__", None) is not trainer:
        return method  # wrapped by another callback
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        found = reference()
        assert found is not None  # the trainer is alive, since it makes this call
        return found(*args, **kwargs)

    return call


class _Progress:
    """Position of a `Trainer`, the same on all ranks: a field of the `State`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.epoch = self.updates = 0
        self.finished = False
        self.order: dict[str, Any] = {}
        self.used_loaders: set[str] = set()  # evaluation loaders that last created persistent workers before a restart

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        exported: dict[str, list[dict[str, Any]]] = {}
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, transformers.trainer_callback.ExportableState):
                attributes = callback.state()["attributes"]
                exported.setdefault(type(callback).__name__, []).append(attributes)
        trainer_state = dataclasses.asdict(trainer.state)
        history = trainer_state["log_history"]
        if self.finished and history and "train_runtime" in history[-1]:
            del history[-1]  # the summary, which is logged again if the job restarts after the end of training
        return {
            "epoch": self.epoch,
            "updates": self.updates,
            "finished": self.finished,
            "asked": self._asked,
            "order": self.order,
            "samples": self._samples,
            "trainer_state": {name: trainer_state[name] for name in _RESTORED},
            "callbacks": exported,
            "loaders": sorted(self.used_loaders.union(getattr(trainer, "_eval_dataloaders", ()))),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer = self._trainer
        loop_position.check_samples(
            saved["samples"],
            self._samples,
            trainer.args.world_size,
            "Set gradient_accumulation_steps by WORLD_SIZE so that per_device_train_batch_size * "
            "gradient_accumulation_steps * WORLD_SIZE stays the same",
        )
        loop_position.check_order(saved["order"], self.order)
        before = saved.get("asked", self._asked)
        if saved["finished"] and any(map(operator.gt, self._asked, before)):
            raise SettingsError(
                f"this job has ended with num_train_epochs={before[0]:g} and max_steps={before[1]}, but "
                f"{self._asked[0]:g} and {self._asked[1]} are requested: it cannot resume exactly. Start another job "
                "from the model that this one saved"
            )
        self.epoch = saved["epoch"]
        self.updates = saved["updates"]
        self.finished = saved["finished"]
        self.used_loaders = set(saved.get("loaders", ()))
        for name, value in saved["trainer_state"].items():
            setattr(trainer.state, name, value)
        # Logging starts from this step, unless this rank's losses are restored as well.
        trainer._initial_global_step = trainer._globalstep_last_logged = trainer.state.global_step
        for callback in trainer.callback_handler.callbacks:
            attributes = saved["callbacks"].get(type(callback).__name__)
            for name, value in attributes.pop(0).items() if attributes else ():
                setattr(callback, name, value)

    @property
    def _asked(self) -> tuple[float, int]:
        """Epochs and steps that the script requests. The number of steps applies unless it is -1."""
        return self._trainer.args.num_train_epochs, self._trainer.args.max_steps

    @property
    def _samples(self) -> int:
        args = self._trainer.args
        return int(self._trainer._train_batch_size * args.gradient_accumulation_steps * args.world_size)


class _Losses:
    """Losses that a rank has not logged yet: a local field of the `State`."""

    def __init__(self, trainer: Any, progress: _Progress) -> None:
        self._trainer = trainer
        self._progress = progress

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            # At the end, the Trainer has added the loss to its total, and after a restart adds it again.
            "loss": torch.zeros_like(trainer._tr_loss) if self._progress.finished else trainer._tr_loss,
            "logged": (
                float(trainer._total_loss_scalar),
                trainer._globalstep_last_logged,
                trainer._initial_global_step,
            ),
            "flos": float(trainer.current_flos),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer._tr_loss.copy_(saved["loss"])
        total_loss, last_logged, initial_step = saved["logged"]
        trainer._total_loss_scalar = total_loss
        trainer._globalstep_last_logged = last_logged
        trainer._initial_global_step = initial_step
        trainer.current_flos = saved["flos"]
