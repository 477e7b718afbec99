"""`DistillTrainer`, a Hugging Face `Trainer` that learns from teachers' labels.

The `Trainer` creates, shards, skips and resumes its loaders as usual. Labels are added where the `Trainer` takes
batches from an epoch's iterator, so that a rank requests labels only for batches on which it is about to train.
"""

from __future__ import annotations

import inspect
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from typing_extensions import override

from edl.distill.compress import TopK
from edl.distill.divergences import NO_LABEL
from edl.distill.loader import Inputs, Route, TeachersLike, no_teachers
from edl.distill.options import Options
from edl.distill.stats import ReaderStats
from edl.distill.torch import TorchLoader, distill
from edl.distill.transformers.student_loss import (
    DistillArguments,
    all_classes,
    check_head,
    check_token_types,
    find_texts,
    learned_rows,
    logits_of,
    student_loss,
    text_bytes,
)
from edl.errors import SettingsError
from edl.protocol.names import IDS
from edl.tokenizer_hash import hash_tokenizer

logger = logging.getLogger("edl.distill")

_LABELS = "teacher_labels"  # the key of a batch's labels; no model of transformers has an argument of that name

_ANY_ARGUMENTS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class DistillTrainer(transformers.Trainer):
    """A `Trainer` whose loss uses teachers' labels and, optionally, the batch's own labels.

    ::

        trainer = DistillTrainer(
            model, args, train_dataset=dataset, processing_class=tokenizer, data_collator=collator,
            teachers="llama-70b", distill_args=DistillArguments(beta=0.5, hard_weight=0.1),
        )
        trainer.train()

    Attributes:
        distill_args: The arguments, as given.
    """

    loss_is_scaled_for_ga = True  # it is the sum over rows, divided by the rows of the whole step

    def __init__(
        self,
        *args: Any,
        teachers: TeachersLike = None,
        discovery: str | None = None,
        route: Route = None,
        distill_args: DistillArguments | None = None,
        inputs: Inputs | None = None,
        columns: Sequence[str] = (),
        options: Options | None = None,
        **kwargs: Any,
    ) -> None:
        """Create a trainer; no teacher is asked before training or an evaluation starts.

        Args:
            *args: Positional arguments of `transformers.Trainer`.
            teachers: Teachers to ask; see `edl.distill.torch.distill`.
            discovery: URL of the registry for the service in `teachers`.
            route: Column of the dataset whose value selects the teachers of each row; see `edl.distill.torch.distill`.
                The student does not receive this column.
            distill_args: What to learn; None for forward KL with a causal language model.
            inputs: Inputs of the teachers; see `edl.distill.torch.distill`. None for the texts of the batch
                (`input_ids`), in the form that `edl serve --hf` expects.
            columns: Dataset columns that functions in `inputs` or `route` need. The student does not receive these
                columns.
            options: Deadlines, memory and hedging.
            **kwargs: Keyword arguments of `transformers.Trainer`.

        Raises:
            SettingsError: An argument is invalid, or the training setup does not support labels.
        """
        if no_teachers(teachers):
            raise SettingsError("teachers is an empty list: use transformers.Trainer to train without teachers")
        self.distill_args = distill_args or DistillArguments()
        super().__init__(*args, **kwargs)
        self._check_settings(inputs)
        self._teachers = teachers
        self._discovery = discovery
        self._route = route
        self._teacher_inputs = inputs
        self._options = options
        named: list[Any] = list(inputs.values()) if isinstance(inputs, Mapping) else []
        student = _parameters_of(getattr(self.model, "get_base_model", lambda: self.model)())  # unwraps PEFT models
        if inputs is None:
            named.append("token_type_ids")  # kept even if the student lacks them: they show that texts are pairs
        columns = (*columns, route) if isinstance(route, str) else columns
        self._teacher_columns = [str(name) for name in (*named, *columns) if isinstance(name, str)]
        self._not_for_student = {*self._teacher_columns} - {*student, "labels"}
        if all(parameter.kind in _ANY_ARGUMENTS for parameter in student.values()):  # its signature names no inputs
            self._not_for_student = set(columns)
        self._labelled: TorchLoader[Any] | None = None
        self._epoch: Iterator[Any] | None = None
        self._epoch_source: Any = None
        self._head_is_checked = self._ends_are_checked = False

    def label_stats(self) -> ReaderStats | None:
        """Return the label counters of the current training; None while no training runs."""
        return self._labelled.stats() if self._labelled is not None else None

    @override
    def train(self, *args: Any, **kwargs: Any) -> Any:
        # Disconnects from the teachers at the end, even after an error.
        self._head_is_checked = False
        try:
            return super().train(*args, **kwargs)
        finally:
            labelled, self._labelled = self._labelled, None
            self._epoch = self._epoch_source = None
            if labelled is not None:
                labelled.close()

    @override
    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        # Takes the batches of an optimizer step with labels.
        if self._epoch is None or self._epoch_source is not epoch_iterator:
            if self._labelled is None:
                self._labelled = self._label(self.callback_handler.train_dataloader)
            self._epoch_source = epoch_iterator
            self._epoch = self._merged(self._labelled.label(epoch_iterator))
        return super().get_batch_samples(self._epoch, num_batches, device)

    @override
    def evaluation_loop(self, dataloader: Any, description: str, *args: Any, **kwargs: Any) -> Any:
        if not self.distill_args.eval_teachers or description != "Evaluation":
            return super().evaluation_loop(dataloader, description, *args, **kwargs)
        with self._label(dataloader) as labelled:
            merged: Any = _EvaluationBatches(dataloader, self._merged(iter(labelled)))
            return super().evaluation_loop(merged, description, *args, **kwargs)

    @override
    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        # With teachers' labels, a batch needs no labels of its own for a loss.
        usual = self.label_names, self.can_return_loss
        if _LABELS not in inputs or (usual[0] and all(inputs.get(name) is not None for name in usual[0])):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        self.label_names, self.can_return_loss = [], True  # so that it calls `compute_loss`
        try:
            return *super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)[:2], None
        finally:
            self.label_names, self.can_return_loss = usual

    @override
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        # Uses teachers' labels; for batches without them, as in evaluations, the Trainer's own loss.
        if _LABELS not in inputs:
            if isinstance(num_items_in_batch, torch.Tensor) and num_items_in_batch.ndim:
                num_items_in_batch = num_items_in_batch[-1]
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        arguments = self.distill_args
        batch = dict(inputs)
        labels = batch.pop(_LABELS)
        asked = {name: value for name, value in batch.items() if name not in ("labels", "shift_labels")}
        chunked = arguments.chunked_head and model.training
        if chunked:
            asked |= {"logits_to_keep": 1, "output_hidden_states": True}
        outputs = model(**asked)
        logits, head = logits_of(outputs), None
        if chunked:
            logits, head = self._states(outputs, logits)
        labels = labels if isinstance(labels, TopK) else all_classes(labels, arguments.temperature)
        count = self._count_rows([batch]) if num_items_in_batch is None else num_items_in_batch
        loss = student_loss(arguments, batch, labels, count, logits, head)
        if self.args.average_tokens_across_devices:  # the count covers all processes, over which DDP averages
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        loss = loss + self._router_loss(outputs, training=model.training)  # already a mean over this process
        # `prediction_step` drops the first element of a tuple or tensor, which is usually a loss.
        return (loss, outputs if isinstance(outputs, dict) else {"logits": logits}) if return_outputs else loss

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        if not batch_samples:
            return None
        count = self._count_rows(batch_samples).to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            count = self.accelerator.gather(count.unsqueeze(0)).sum(0)
        return count / self.get_tp_size()

    def _count_rows(self, batches: list[Any]) -> torch.Tensor:
        if self.distill_args.of_tokens:
            shifted = self.distill_args.task == "causal-lm"
            return torch.stack([learned_rows(batch, shifted=shifted).sum() for batch in batches]).sum()
        rows = [next(len(value) for value in batch.values() if isinstance(value, torch.Tensor)) for batch in batches]
        if not self.distill_args.hard_weight:
            return torch.tensor(sum(rows))
        own = [batch["labels"] for batch in batches if isinstance(batch.get("labels"), torch.Tensor)]
        return torch.tensor([sum(rows), sum(int((labels != NO_LABEL).sum()) for labels in own)])

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = super()._prepare_inputs(
            {name: value for name, value in inputs.items() if name not in (*self._not_for_student, _LABELS)}
        )
        if _LABELS in inputs:  # moved here, so that a whole step's labels are not on the device at once
            found[_LABELS] = inputs[_LABELS].to(self.args.device, non_blocking=True)
        return found

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns: list[str] = self._signature_columns  # type: ignore[assignment]  # is set by now
        columns += [name for name in self._teacher_columns if name not in columns]

    def _label(self, loader: Any) -> TorchLoader[Any]:
        arguments = self.distill_args
        inputs: Inputs | None = self._teacher_inputs
        tokens: Any = None
        if arguments.of_tokens:
            more = inputs if isinstance(inputs, Mapping) else {}
            inputs = {IDS: _ids_alone if inputs is None else lambda batch: find_texts(batch).ids, **more}
            tokens = lambda batch: find_texts(batch).mask  # noqa: E731
        return distill(
            loader,
            self._teachers,
            inputs=inputs if inputs is not None else {IDS: text_bytes},
            outputs=arguments.output,
            discovery=self._discovery,
            route=self._route,
            tokens=tokens,
            tokenizer=self._tokenizer() if arguments.tokenizer is None else arguments.tokenizer,
            top_k=arguments.kept,
            temperature=arguments.temperature,
            ahead=arguments.ahead,
            options=self._options,
        )

    def _merged(self, labelled: Iterator[tuple[Any, Any]]) -> Iterator[dict[str, Any]]:
        for batch, labels in labelled:
            if self.distill_args.of_tokens and "attention_mask" not in batch and "position_ids" in batch:
                texts = find_texts(batch)
                if texts.packed:
                    mask, shape = torch.from_numpy(texts.mask != 0), batch["input_ids"].shape
                    labels = labels.map(lambda part, mask=mask, shape=shape: part[mask].unflatten(0, shape))
            yield {**self._with_ends(batch), _LABELS: labels}

    def _with_ends(self, batch: Any) -> Any:
        """Return a batch in which the end token of each text is learned, even if it is also the padding token."""
        collator, attended = self.data_collator, batch.get("attention_mask")
        if self.distill_args.task != "causal-lm" or attended is None:
            return batch
        # This collator's labels are the input without padding tokens; derived collators may return different ones.
        if type(collator) is transformers.DataCollatorForLanguageModeling and not collator.mlm:
            if collator.tokenizer.pad_token_id == collator.tokenizer.eos_token_id:
                return {**batch, "labels": batch["input_ids"].masked_fill(attended == 0, NO_LABEL)}
        elif not self._ends_are_checked and batch.get("labels") is not None and not attended.all():
            self._ends_are_checked = True  # once, since it waits for a GPU; the first batch with padding is enough
            ids, labels = batch["input_ids"], batch["labels"]
            token = ids[attended == 0][0]
            ends = (ids[:, 1:] == token) & (attended[:, 1:] != 0) & (labels[:, :-1] != NO_LABEL)
            if ends.any() and (labels[:, 1:][ends] == NO_LABEL).all():
                logger.warning(
                    "token %d both pads and ends texts, and its labels are all %d: the student never learns to "
                    "end a text. Make the collator mask labels only where attention_mask is 0, or give the "
                    "tokenizer a separate padding token",
                    token,
                    NO_LABEL,
                )
        return batch

    def _states(self, outputs: Any, logits: torch.Tensor) -> tuple[torch.Tensor, Any]:
        states = outputs.hidden_states[-1]
        embeddings = self.accelerator.unwrap_model(self.model).get_output_embeddings()

        def head(part: torch.Tensor) -> Any:
            with self.accelerator.autocast():
                return embeddings(part)

        if not self._head_is_checked:
            check_head(states, logits, head)
            self._head_is_checked = True
        return states, head

    def _router_loss(self, outputs: Any, *, training: bool) -> torch.Tensor | float:
        loss = outputs.get("aux_loss") if isinstance(outputs, Mapping) else None
        if loss is None:
            return 0.0
        share = getattr(getattr(self.model, "config", None), "router_aux_loss_coef", 0.0)
        batches = getattr(self, "current_gradient_accumulation_steps", 1) if training else 1
        added: torch.Tensor = loss * share / max(batches, 1)
        return added

    def _tokenizer(self) -> str:
        """Return the hash of the student's tokenizer; empty if the student has no comparable tokenizer."""
        if not getattr(self.processing_class, "is_fast", False):
            return ""
        with tempfile.TemporaryDirectory() as folder:
            self.processing_class.save_pretrained(folder)  # type: ignore[union-attr]  # a tokenizer
            return hash_tokenizer(folder)

    def _check_settings(self, inputs: Inputs | None) -> None:
        arguments, args = self.distill_args, self.args
        config = getattr(self.model, "config", None)
        if self.compute_loss_func is not None:
            raise SettingsError("compute_loss_func would replace the distillation loss: omit it")
        if args.label_smoothing_factor:
            raise SettingsError("label_smoothing_factor: the teachers' labels are already smooth; omit it")
        if getattr(config, "is_encoder_decoder", False):
            raise SettingsError(
                "the student is an encoder-decoder, whose output rows do not match its inputs: distil a causal "
                "language model, a masked language model or a classifier"
            )
        if args.n_gpu > 1:
            raise SettingsError(
                f"{args.n_gpu} GPUs in one process (DataParallel) would get one another's labels: start the script "
                "with torchrun or edl run, one process per GPU"
            )
        if self.get_sp_size() > 1 or self.get_cp_size() > 1:
            raise SettingsError(
                "sequence and context parallelism split texts, but labels are for whole texts: switch both off"
            )
        if arguments.of_tokens and inputs is not None and not isinstance(inputs, Mapping):
            raise SettingsError(f"inputs={inputs!r}: with tokens, pass further inputs as {{name: key or function}}")
        if arguments.chunked_head:
            self._check_head_settings()

    def _check_head_settings(self) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise SettingsError("chunked_head=True: FSDP and DeepSpeed shard the head; omit chunked_head")
        parameters = _parameters_of(self.model)
        embeddings = getattr(self.model, "get_output_embeddings", lambda: None)()
        if "logits_to_keep" not in parameters or embeddings is None:
            raise SettingsError(
                f"chunked_head=True: {type(self.model).__name__} has no logits_to_keep or no output embeddings, so its "
                "logits cannot be skipped; omit chunked_head"
            )


def _parameters_of(model: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


def _ids_alone(batch: Mapping[str, Any]) -> Any:
    """Return the token ids [texts, longest] of a batch; teachers get no other input from it."""
    texts = find_texts(batch)
    check_token_types(batch, texts)
    return texts.ids


class _EvaluationBatches:
    """Replaces an evaluation's loader with batches that have labels."""

    def __init__(self, loader: Any, batches: Iterator[dict[str, Any]]) -> None:
        self._loader = loader
        self._batches = batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._batches

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
