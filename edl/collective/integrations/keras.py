"""Keras' `model.fit` under `edl run`, with the torch backend: `ElasticDataset` and `ElasticCallback`.

`fit` supports neither ranks nor a position within an epoch. `ElasticDataset` gives each rank its share of every global
batch, from the restored position on. When the optimizer applies gradients, `ElasticCallback` averages them, weighted by
the ranks' shares. So the update is the same as in a single process that trains on the whole batch. The callback saves
the state after each batch and restores it when `fit` begins. `fit` then starts with the restored epoch, and calls
`on_epoch_begin` of other callbacks once more. What these callbacks change, such as the learning rate, is restored
before the first batch. `fit` asks how many batches a whole epoch has, and would warn when a resumed epoch ends sooner;
that warning is silenced.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import torch
import torch.distributed as dist

from edl.collective.checkpoint.checkpointer import Checkpointer
from edl.collective.checkpoint.state.loaders import capture_random_states, restore_random_states
from edl.collective.checkpoint.state.state import State
from edl.collective.integrations.loop_position import BoundaryCheckpointer
from edl.collective.ranks import broadcast_tensor
from edl.collective.training.gradients import average_gradients
from edl.collective.training.sampler import ElasticSampler
from edl.errors import SettingsError


class ElasticDataset(keras.utils.PyDataset):  # type: ignore[misc]
    """Give each rank its share of every global batch, in an order that depends only on the seed and the epoch.

    The `shuffle` argument of `fit` does not change this order. For soft labels, wrap this dataset in
    `edl.distill.keras.SoftLabelDataset`.

    Args:
        x: Inputs: an array [samples, ...], or a dict of such arrays.
        y: Targets [samples, ...].
        global_batch: Samples per step, over all ranks.
        seed: Shuffle seed.

    Raises:
        SettingsError: An argument is out of range.
    """

    def __init__(self, x: Any, y: Any, *, global_batch: int, seed: int = 0) -> None:
        super().__init__(workers=1)  # batches are taken in order, from one thread
        _join_group()
        self.sampler = ElasticSampler(len(y), global_batch=global_batch, seed=seed)
        self._x, self._y = x, y
        self._shares: Iterator[list[int]] = iter(())
        self.before_epoch: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        """Return the number of batches that are left in the epoch."""
        return len(self.sampler)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return this rank's share of the next batch, whatever `index` is."""
        rows = next(self._shares)
        x = {name: part[rows] for name, part in self._x.items()} if isinstance(self._x, dict) else self._x[rows]
        return x, self._y[rows]

    def on_epoch_begin(self) -> None:
        """Begin reading after the last trained batch. Keras calls this after the callbacks' `on_epoch_begin`."""
        self.before_epoch()
        self._shares = iter(self.sampler)


class ElasticCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Make `model.fit` elastic: workers may join and leave without changing the result.

    ::

        dataset = ElasticDataset(images, labels, global_batch=64)
        model.fit(dataset, epochs=10, callbacks=[ElasticCallback(dataset)])

    The callback restores the weights, the optimizer, the seeds of layers such as dropout, the metrics and the position
    in the data. All ranks begin with the weights of rank 0. At the end of an epoch, metrics cover the rows of all
    ranks. Other callbacks, such as `EarlyStopping`, start over.

    Args:
        dataset: The `ElasticDataset` that `fit` trains on, directly or inside a `SoftLabelDataset`.
        **options: Options of the `Checkpointer`.

    Raises:
        SettingsError: The dataset is not an `ElasticDataset`, or Keras' backend is not torch.
    """

    def __init__(self, dataset: ElasticDataset, **options: Any) -> None:
        super().__init__()
        if keras.backend.backend() != "torch":
            raise SettingsError(
                f"Keras uses {keras.backend.backend()}, but edl run needs torch: set KERAS_BACKEND=torch"
            )
        if not isinstance(dataset, ElasticDataset):
            raise SettingsError(f"dataset of type {type(dataset).__name__}: expected an ElasticDataset")
        self._dataset, self._sampler = dataset, dataset.sampler
        self._options = options
        self._resuming = False

    def on_train_begin(self, logs: Any = None) -> None:
        model, sampler = self.model, self._sampler
        if not isinstance(model.optimizer, keras.optimizers.Optimizer):
            raise SettingsError("the model has no Keras optimizer: compile() it before fit()")
        if not len(sampler) or self.params["steps"] != len(sampler):  # a resumed epoch would train as many again
            raise SettingsError(
                "an epoch is the whole ElasticDataset: leave out steps_per_epoch of fit(), and create another dataset "
                "for a second fit()"
            )
        BoundaryCheckpointer.begin_loop(self._options)
        model.optimizer.build(model.trainable_variables)
        _spread(model.variables)
        self._metrics = _Variables(model.metrics_variables)
        self._variables = _Variables([*model.variables, *model.optimizer.variables])
        self._state = State(
            variables=self._variables, sampler=sampler, step=-1, metrics=self._metrics, local=["metrics"]
        )
        self._checkpointer = Checkpointer(self._state, **self._options)
        self._resuming = self._checkpointer.restore() >= 0
        self._dataset.before_epoch = self._undo_callbacks
        # A finished epoch is repeated without a batch, which draws as many random numbers as its end did.
        self._cut = self._resuming and not sampler.finished
        self._rng = capture_random_states() if self._cut else None
        model._initial_epoch = sampler.epoch
        self._apply = model.optimizer.apply
        model.optimizer.apply = self._apply_averaged

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin an epoch, or resume it with its saved metrics."""
        self._sampler.set_epoch(epoch)
        if self._resuming:
            self._metrics.apply()
            warnings.filterwarnings("ignore", "Your input ran out of data")

    def _undo_callbacks(self) -> None:
        """Undo what a schedule did in the resumed epoch's `on_epoch_begin`: the saved state already includes that."""
        if self._resuming:
            self._resuming = False
            self._variables.apply()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Restore the random number states that the first batch began with."""
        if self._rng is not None:
            restore_random_states(self._rng)
            self._rng = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        share = self._sampler.share_rows
        self._sampler.advance()
        if self._sampler.finished:  # until then, the statistics of batch normalization are each rank's own
            _spread(self.model.non_trainable_variables)
            if dist.is_initialized():
                for variable in self.model.metrics_variables:  # sums and counts
                    dist.all_reduce(variable.value.data)
        self._state.step += 1
        self._checkpointer.save(self._state.step, samples=share)
        if self._cut and self._sampler.finished:
            self._cut = False
            torch.empty((), dtype=torch.int64).random_()  # as `fit` does at the end of an epoch that it began

    def on_train_end(self, logs: Any = None) -> None:
        self.model._initial_epoch = None
        self.model.optimizer.apply = self._apply
        self._checkpointer.__exit__(None, None, None)

    def _apply_averaged(self, gradients: Any, variables: Any = None) -> None:
        parameters = [variable.value for variable in variables]
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world > 1:
            share = world * self._sampler.share_rows / self._sampler.batch_samples
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(share)
            average_gradients(parameters, None)
        self._apply([parameter.grad for parameter in parameters], variables)


def _spread(variables: list[Any]) -> None:
    """Give all ranks the values of rank 0."""
    for variable in variables:
        broadcast_tensor(variable.value.data, 0)


class _Variables:
    """Keras variables as a field of a `State`, by position because several may have the same path."""

    def __init__(self, variables: list[Any]) -> None:
        self._variables = variables
        self._saved: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {str(number): variable.value.detach() for number, variable in enumerate(self._variables)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if len(saved) != len(self._variables):
            raise SettingsError(f"the saved state has {len(saved)} variables, but the model has {len(self._variables)}")
        self._saved = saved
        self.apply()

    def apply(self) -> None:
        """Assign the restored values. Call this again if Keras has reset the variables since."""
        for number, value in self._saved.items():
            self._variables[int(number)].assign(value)


def _join_group() -> None:
    """Join the job's other workers in a process group, as a script for torchrun does itself."""
    if "RANK" in os.environ and not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
