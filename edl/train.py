"""The training loop of `edl train`: from a model definition and a Parquet file to a trained model.

Each worker in the job runs `main`, as the module `edl.train` under `edl run`. The user's file defines `model()`;
everything else has a default. Each worker holds the table in memory, and an `ElasticSampler` distributes the table's
rows among the workers. `distill` adds the teachers' soft labels, an `ElasticTrainer` updates the model once per batch
of all workers, and a `Checkpointer` saves the training state. At the end of each epoch, the workers share the work of
the evaluation. The first worker writes the trained model.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeAlias

import fsspec  # type: ignore[import-untyped]
import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from edl.collective import Checkpointer, ElasticSampler, ElasticTrainer, Evaluator, State
from edl.collective.ranks import gather_bytes
from edl.collective.training.gradients import check_materialized
from edl.datasets.files import find_files, open_file
from edl.datasets.parquet import import_parquet
from edl.distill.divergences import NO_LABEL
from edl.distill.losses import DistillLoss, kl_divergence, logit_mse
from edl.distill.torch import distill
from edl.errors import EDLError, NoTeacherError, SettingsError
from edl.quoting import did_you_mean, quote

Columns: TypeAlias = dict[str, Any]
"""Rows of a table, by column: a tensor [rows, ...], or a list of strings, bytes or sequences of different lengths."""

_EVALUATION_S: Final = 3600.0  # longest duration of an evaluation before it counts as a hang
_PROGRESS_S: Final = 30.0  # between progress lines within an epoch


@dataclass(frozen=True)
class TrainPlan:
    """The data and settings of a training run; each field is an option of `edl train`."""

    data: str
    eval: str | None = None
    inputs: tuple[str, ...] = ()
    label: str | None = None
    teachers: str | None = None
    teacher_inputs: tuple[str, ...] = ()  # NAME or NAME=COLUMN
    teacher_output: str = "logits"
    temperature: float = 4.0
    alpha: float = 0.9
    epochs: int = 10
    batch: int = 64
    micro_batch: int | None = None
    seed: int = 0
    store: str | None = None
    output: str = "trained"


def main(arguments: Sequence[str]) -> int:
    """Train as one worker in a job. `arguments` are the path of the user's file and a `TrainPlan` in JSON."""
    path, plan = arguments
    try:
        _Training(load_definition(path), TrainPlan(**json.loads(plan))).run()
    except NoTeacherError:  # recognized by the agent in the traceback: the job can be started again
        raise
    except EDLError as exc:  # a user's mistake: a traceback through this file would not help
        print(f"edl train: {exc}", file=sys.stderr, flush=True)  # noqa: T201 - as `edl` itself does
        return 2 if isinstance(exc, SettingsError) else 1
    return 0


def load_definition(path: str) -> ModuleType:
    """Import the user's file, which may import files beside it. Raises `SettingsError` if it lacks `model()`."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise SettingsError(f"{path}: there is no such Python file")
    definition = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))
    sys.modules.setdefault(Path(path).stem, definition)
    spec.loader.exec_module(definition)
    if not hasattr(definition, "model"):
        hint = did_you_mean("model", [name for name, value in vars(definition).items() if callable(value)])
        raise SettingsError(f"{path} has no function model(), which returns the network to train{hint}")
    for name in ("model", "loss", "optimizer", "transform", "metrics"):
        if not callable(getattr(definition, name, print)):
            raise SettingsError(f"{path}: {name} must be a function, not {quote(getattr(definition, name))}")
    return definition


class ParquetTable(Dataset[Columns]):
    """The rows of Parquet files, in memory. `transform` is the user's function that maps columns to columns.

    Columns of numbers, or of equally long lists of numbers, become tensors; other columns become lists.
    """

    def __init__(self, location: str, transform: Any = None) -> None:
        _, paths, _ = find_files(location)
        import_parquet()  # raises an error that says how to install pyarrow
        import pyarrow

        parts = []
        for path in paths:
            try:
                with open_file(path) as file:
                    parts.append(import_parquet().read_table(file))
            except pyarrow.ArrowInvalid as exc:
                raise SettingsError(f"{path} is not a Parquet file: {exc}") from exc
            if parts[-1].schema.names != parts[0].schema.names:
                raise SettingsError(f"{path} has different columns than {paths[0]}: {parts[-1].schema.names}")
        table = pyarrow.concat_tables(parts, promote_options="permissive")
        self.location = location
        self._transform = transform
        self._rows: int = table.num_rows
        if not self._rows:
            raise SettingsError(f"{location} has no rows")
        self._columns = {name: self._load(name, table[name]) for name in table.schema.names}

    def _load(self, name: str, column: Any) -> Any:
        """Return a column as an array [rows, ...], or unchanged if it cannot be an array."""
        if column.null_count:
            raise SettingsError(f"{self.location}: column {name!r} has {column.null_count:,} empty values: fill them")
        arrays = [_as_array(chunk) for chunk in column.chunks if len(chunk)]
        if any(array is None or array.shape[1:] != arrays[0].shape[1:] for array in arrays):
            return column
        array = np.concatenate(arrays)
        return array.astype(np.float32) if array.dtype in (np.float16, np.float64) else array

    def __len__(self) -> int:
        return self._rows

    def __getitems__(self, rows: Sequence[int]) -> Columns:
        """Return several rows at once, as a `DataLoader` requests them."""
        batch = {
            name: torch.from_numpy(column[rows]) if isinstance(column, np.ndarray) else column.take(rows).to_pylist()
            for name, column in self._columns.items()
        }
        return batch if self._transform is None else self._transform(batch)


def _as_array(values: Any) -> Any:
    """Return Arrow's numbers, or equally long lists of numbers, as an array [rows, ...]; None for anything else."""
    from pyarrow import types

    shape = [len(values)]
    while types.is_list(values.type) or types.is_large_list(values.type) or types.is_fixed_size_list(values.type):
        if len(values.value_lengths().unique()) > 1 or values.null_count:
            return None
        count, values = len(values), values.flatten()
        shape.append(len(values) // count if count else 0)
    numbers = types.is_integer(values.type) or types.is_floating(values.type) or types.is_boolean(values.type)
    return values.to_numpy(zero_copy_only=False).reshape(shape) if numbers and not values.null_count else None


class _Training:
    def __init__(self, definition: ModuleType, plan: TrainPlan) -> None:
        self._definition = definition
        self._plan = plan
        self._device = torch.device("cpu")
        if torch.cuda.is_available():
            self._device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self._device)
        transform = getattr(definition, "transform", None)
        self._table = ParquetTable(plan.data, transform)
        self._choose_columns(self._table)
        self._eval_table = ParquetTable(plan.eval, transform) if plan.eval is not None else None
        if self._eval_table is not None:
            if self._label is None:
                raise SettingsError(f"--eval {plan.eval}: there is no label to compare with: name the column (--label)")
            self._batch(self._eval_table, [0])

    def run(self) -> None:
        plan = self._plan
        dist.init_process_group("nccl" if self._device.type == "cuda" else "gloo")
        if dist.get_rank() == 0:
            self._check_output()
        torch.manual_seed(plan.seed)
        self._network = self._made("model", None, nn.Module).to(self._device).train()  # also a pretrained one
        keras = sys.modules.get("keras")  # with its torch backend, whose models are modules
        self._how = {"training": True} if keras is not None and isinstance(self._network, keras.Model) else {}
        check_materialized(self._network)
        parameters = [parameter for parameter in self._network.parameters() if parameter.requires_grad]
        if not parameters:
            raise SettingsError(
                "the result of model() has no parameter to train: leave some parameters unfrozen, and begin a "
                "Keras model with keras.Input"
            )
        optimizer = self._made("optimizer", torch.optim.Adam, torch.optim.Optimizer, parameters)
        self._sampler = sampler = ElasticSampler(len(self._table), global_batch=plan.batch, seed=plan.seed)
        self._evaluator = Evaluator(self._evaluate, limit_s=_EVALUATION_S)
        self._state = State(
            model=self._network, optimizer=optimizer, sampler=sampler, evaluator=self._evaluator, step=-1
        )
        with Checkpointer(self._state) as self._checkpointer:
            self._checkpointer.restore()
            model = DistributedDataParallel(self._network) if dist.get_world_size() > 1 else self._network
            trainer = ElasticTrainer(model, optimizer, sampler=sampler, max_micro_batch=plan.micro_batch)
            needed: Any = self._needed
            loader = DataLoader(self._table, batch_sampler=sampler, collate_fn=needed, generator=torch.Generator())
            teachers = [] if plan.teachers is None else plan.teachers
            if self._state.step < 0 and self._eval_table is not None:
                self._evaluate(plan.batch)  # an unsound metrics() fails now, not after an epoch
            with distill(
                loader,
                teachers,
                inputs=self._asked,
                outputs=plan.teacher_output,
                discovery=plan.store,
                device=self._device,
            ) as labelled:
                for epoch in sampler.epochs(plan.epochs):
                    self._train_epoch(epoch, labelled, trainer)
        if dist.get_rank() == 0:
            self._export()
        dist.destroy_process_group()

    def _train_epoch(self, epoch: int, labelled: Any, trainer: ElasticTrainer) -> None:
        sampler, state = self._sampler, self._state
        begin = told_at = time.monotonic()
        before = sampler.consumed
        losses, rows = torch.zeros((), dtype=torch.float64, device=self._device), 0
        for batch in labelled:
            share = sampler.share_rows
            for columns, soft in trainer.micro_batches(batch):
                loss = self._loss(trainer.model(*self._take(columns), **self._how), columns, soft)
                trainer.backward(loss)
                count = min(share, len(columns[self._inputs[0]]))  # 0 for a filler row
                losses += loss.detach() * count
                rows += count
            trainer.step()
            state.step += 1
            self._checkpointer.save(state.step, samples=share)
            if time.monotonic() - told_at > _PROGRESS_S:
                told_at = time.monotonic()
                self._tell(f"epoch {epoch}: {sampler.consumed:,} of {len(self._table):,} rows")
        trained = sampler.consumed - before  # 0 after a restart between an epoch's last step and its evaluation
        mean = _mean_of_all({"training loss": (float(losses), rows)}) if trained else {}
        if not all(map(math.isfinite, mean.values())):
            raise SettingsError(
                f"epoch {epoch}: the training loss is {mean['training loss']}: look for NaN in the data and in the "
                "result of model(), or choose a lower learning rate in optimizer()"
            )
        if self._eval_table is not None and (trained or state.step not in self._evaluator.results):
            mean |= self._checkpointer.evaluate(self._evaluator)
        if mean:
            text = ", ".join(f"{name} {value:.4g}" for name, value in mean.items())
            workers, per_s = dist.get_world_size(), trained / (time.monotonic() - begin)
            self._tell(f"epoch {epoch}: {text}, {per_s:,.0f} rows/s by {workers} worker{'s'[: workers - 1]}")

    # --- Loss and metrics ---

    def _own_loss(self, *, soft: bool) -> Callable[..., Tensor] | None:
        """Return the user's `loss` if it takes three arguments (with `soft`) or two (without); None otherwise."""
        own: Callable[..., Tensor] | None = getattr(self._definition, "loss", None)
        return own if own is not None and (len(inspect.signature(own).parameters) > 2) == soft else None

    def _loss(self, outputs: Any, columns: Columns, soft: Tensor | None) -> Tensor:
        labels = columns.get(self._label) if self._label is not None else None
        if (whole := self._own_loss(soft=True)) is not None:
            return whole(outputs, labels, soft)
        hard = None if labels is None else (self._own_loss(soft=False) or _hard_loss)(outputs, labels)
        if soft is None:
            assert hard is not None
            return hard
        _check_tensor(outputs, "the soft loss", "loss(outputs, labels, soft)")
        plan = self._plan
        try:
            if labels is not None and labels.is_floating_point():
                soft_loss: Tensor = logit_mse(outputs, soft)
            else:
                soft_loss = kl_divergence(outputs, soft, temperature=plan.temperature)
        except SettingsError as exc:
            raise SettingsError(
                f"the teachers' output {plan.teacher_output!r} does not match the result of model(): {exc}. Choose "
                "another output (--teacher-output), or define loss(outputs, labels, soft)"
            ) from exc
        return soft_loss if hard is None else plan.alpha * soft_loss + (1.0 - plan.alpha) * hard

    def _evaluate(self, rows_each: int | None = None) -> dict[str, float]:
        """Return the metrics' means over the table, or over the first `rows_each` rows of each worker."""
        table = self._eval_table
        assert table is not None
        mine = range(dist.get_rank(), len(table), dist.get_world_size())[:rows_each]
        sums: dict[str, tuple[float, int]] = {}
        self._network.eval()
        with torch.no_grad():  # not inference_mode: what a model keeps of its first call must be trainable
            for at in range(0, len(mine), self._plan.batch):
                rows = mine[at : at + self._plan.batch]
                columns = {name: value.to(self._device) for name, value in self._batch(table, rows).items()}
                outputs = self._network(*self._take(columns))
                for name, (mean, count) in self._measure(outputs, columns[self._label or ""]).items():
                    before = sums.get(name, (0.0, 0))
                    try:
                        sums[name] = before[0] + float(mean) * count, before[1] + count
                    except (TypeError, ValueError, RuntimeError) as exc:
                        raise SettingsError(f"metric {name!r}: expected a number, not {quote(mean)}") from exc
        self._network.train()
        return _mean_of_all(sums)

    def _measure(self, outputs: Any, labels: Tensor) -> dict[str, tuple[Any, int]]:
        """Return each metric's mean, and the number of rows that it is the mean of."""
        if (own := getattr(self._definition, "metrics", None)) is not None:
            means = own(outputs, labels)
            if not isinstance(means, Mapping):
                raise SettingsError(f"metrics(outputs, labels) must return a dict of numbers, not {quote(means)}")
            return {name: (mean, len(labels)) for name, mean in means.items()}
        if not isinstance(outputs, Tensor) and (loss := self._own_loss(soft=False)) is not None:
            return {"loss": (loss(outputs, labels), len(labels))}
        _check_tensor(outputs, "the default evaluation", "metrics(outputs, labels)")
        if not labels.is_floating_point() and outputs.shape[:-1] == labels.shape:
            labelled = labels != NO_LABEL
            outputs, labels = outputs[labelled], labels[labelled]
        if not len(labels):
            return {}
        found = {"loss": (_hard_loss(outputs, labels), len(labels))}
        if not labels.is_floating_point():
            found["accuracy"] = (outputs.argmax(-1) == labels).float().mean(), len(labels)
        return found

    # --- Columns ---

    def _choose_columns(self, table: ParquetTable) -> None:
        """Choose the columns for the model and the loss, based on the transformed first row."""
        plan, found = self._plan, table.__getitems__([0])
        if not isinstance(found, dict):
            raise SettingsError(f"transform(columns) must return a dict of columns, not {quote(found)}")
        self._label = "label" if plan.label is None and "label" in found else plan.label
        if self._label is None and plan.teachers is None:
            raise SettingsError(
                f"{plan.data} has no column 'label': name the one to learn (--label), or teachers to learn from "
                f"(--teachers). It has {', '.join(found)}"
            )
        self._inputs = plan.inputs or [name for name in found if name != self._label]
        pairs = (name.partition("=") for name in plan.teacher_inputs or self._inputs)
        self._asked = {name.strip(): column.strip() or name.strip() for name, _, column in pairs}
        labels = [] if self._label is None else [self._label]
        self._names = list(dict.fromkeys([*self._inputs, *labels, *self._asked.values()]))
        self._batch(table, [0])

    def _needed(self, found: Columns) -> Columns:
        for name in self._names:
            if name not in found:
                raise SettingsError(
                    f"there is no column {name!r}{did_you_mean(name, found)}; the data has {', '.join(found)} "
                    "(--inputs, --label and --teacher-inputs name columns)"
                )
            if not isinstance(found[name], Tensor):
                raise SettingsError(
                    f"column {name!r} has values such as {quote(found[name][0])}, which are not numbers or differ "
                    "in length: convert the column to a tensor in transform(columns), or exclude it with --inputs"
                )
        return {name: found[name] for name in self._names}

    def _batch(self, table: ParquetTable, rows: Sequence[int]) -> Columns:
        return self._needed(table.__getitems__(list(rows)))

    def _take(self, columns: Columns) -> list[Tensor]:
        return [columns[name] for name in self._inputs]

    # --- Output ---

    def _made(self, name: str, default: Any, kind: type, *arguments: Any) -> Any:
        """Call one of the user's functions. Its result must be of type `kind`."""
        made = getattr(self._definition, name, default)(*arguments)
        if not isinstance(made, kind):
            raise SettingsError(f"{name}() must return a torch {kind.__name__}, not {quote(made)}")
        return made

    def _tell(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)  # noqa: T201 - output for the user

    def _check_output(self) -> None:
        """Refuse an output folder that cannot be written to, before training begins."""
        try:
            files, root = fsspec.core.url_to_fs(self._plan.output)
            files.makedirs(root, exist_ok=True)
            files.pipe_file(f"{root}/.writable", b"")
            files.rm_file(f"{root}/.writable")
        except (ImportError, OSError, ValueError) as exc:
            raise SettingsError(f"--output {self._plan.output} cannot be written: {exc}") from exc

    def _export(self) -> None:
        network = deepcopy(self._network).cpu().eval()
        with tempfile.TemporaryDirectory() as folder:
            save_model(network, f"{folder}/model.safetensors")
            results = [{"step": step, **result} for step, result in self._evaluator.results.items()]
            Path(folder, "metrics.json").write_text(json.dumps(results, indent=1))
            if self._how:
                self._network.save(f"{folder}/model.keras")
            else:
                self._write_program(network, f"{folder}/model.pt2")
            files, root = fsspec.core.url_to_fs(self._plan.output)
            made = sorted(Path(folder).iterdir())
            for name in {"model.keras", "model.pt2"} - {path.name for path in made}:  # of an earlier training run
                if files.exists(f"{root}/{name}"):
                    files.rm_file(f"{root}/{name}")
            for path in made:
                files.put_file(str(path), f"{root}/{path.name}")
        self._tell(f"the model is in {self._plan.output}: {', '.join(path.name for path in made)}")

    def _write_program(self, network: nn.Module, path: str) -> None:
        """Write the network, traced by `torch.export` for any number of rows."""
        rows = range(min(2, len(self._table)))  # a dimension of 1 could not be dynamic
        examples = tuple(self._take(self._batch(self._table, rows)))
        try:
            shapes = tuple({0: torch.export.Dim.DYNAMIC} for _ in examples)
            torch.export.save(torch.export.export(network, examples, dynamic_shapes=shapes), path)
        except Exception as exc:  # noqa: BLE001 - whatever the user's code raises under the tracer
            reason = str(exc).strip().partition("\n")[0]
            self._tell(f"no model.pt2, since torch.export cannot trace the model ({reason}); its weights are saved")


def _check_tensor(outputs: Any, purpose: str, function: str) -> None:
    if not isinstance(outputs, Tensor):
        raise SettingsError(
            f"model() returns a {type(outputs).__name__}, but {purpose} needs a tensor: return only the logits, or "
            f"define {function}"
        )


def _hard_loss(outputs: Any, labels: Tensor) -> Tensor:
    _check_tensor(outputs, "the default loss", "loss(outputs, labels)")
    numbers = labels.is_floating_point()
    if outputs.numel() != labels.numel() if numbers else outputs.shape[:-1] != labels.shape:
        expected = "as many numbers" if numbers else "the logits of the classes for each of them"
        raise SettingsError(
            f"the labels are {labels.dtype} {list(labels.shape)}, but model() returns {list(outputs.shape)}: expected "
            f"{expected}. Change model(), or define loss(outputs, labels)"
        )
    if numbers:
        return nn.functional.mse_loss(outputs.reshape(labels.shape), labels)
    # The mean over all rows: that over labelled rows would depend on how the batch is divided among workers.
    return DistillLoss(reduction="none")(outputs, None, labels).mean()  # type: ignore[no-any-return]


def _mean_of_all(sums: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    """Return the means over all workers from each worker's sums and numbers of rows."""
    totals: dict[str, tuple[float, int]] = {}
    for part in gather_bytes(json.dumps(sums).encode()):
        for name, (total, rows) in json.loads(part).items():
            before = totals.get(name, (0.0, 0))
            totals[name] = before[0] + total, before[1] + rows
    return {name: total / max(rows, 1) for name, (total, rows) in totals.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
