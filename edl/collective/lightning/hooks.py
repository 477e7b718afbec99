"""State that a Lightning script puts into checkpoints by hooks of its own."""

from __future__ import annotations

from typing import Any

__all__ = ["CheckpointHooks"]


class CheckpointHooks:
    """State that other callbacks, the module and the data module add to a checkpoint: a field of the `State`."""

    def __init__(self, trainer: Any, version: str) -> None:
        self._trainer = trainer
        self._version = version
        # Folders of loggers' versions: a restarted process has another, and what was the best is in the first one.
        self._derived = [callback for callback in trainer.callbacks if getattr(callback, "dirpath", "") is None]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of callbacks and data module, and what hooks add to a checkpoint or put in its place."""
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
        """Hand each its own again, in the order in which Lightning does."""
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
