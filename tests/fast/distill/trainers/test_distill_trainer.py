"""`DistillTrainer` with real teachers: the update is that of all tokens, however batches are made and resumed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", "5.23", reason="transformers is not installed, or too old")

from edl.distill import Options  # noqa: E402
from edl.distill.transformers import DistillArguments, DistillTrainer  # noqa: E402
from edl.errors import NoTeacherError, SettingsError  # noqa: E402
from edl.testing import LocalTeacher  # noqa: E402
from tests.fast.distill.trainers.students import (  # noqa: E402
    VOCABULARY,
    collate_flat,
    collate_left,
    collate_right,
    expected_loss,
    parameters,
    small_model,
    texts,
    training_arguments,
)


@pytest.fixture(scope="module")
def teacher() -> Iterator[LocalTeacher]:
    with LocalTeacher("prefix_scores", vocabulary=VOCABULARY) as found:
        yield found


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("edl")]
    assert not left


def make(
    folder: Path, teacher: Any, distill_args: DistillArguments | None = None, data: Any = None, **settings: Any
) -> DistillTrainer:
    names = ("model", "data_collator", "callbacks", "options", "eval_dataset", "processing_class", "columns", "inputs")
    given: dict[str, Any] = {name: settings.pop(name) for name in names if name in settings}
    given.setdefault("model", small_model(2))
    given.setdefault("data_collator", collate_right)
    return DistillTrainer(
        args=training_arguments(folder, **settings),
        train_dataset=texts() if data is None else data,
        teachers=getattr(teacher, "endpoint", teacher),
        distill_args=distill_args or DistillArguments(top_k=8),
        **given,
    )


class Rows(transformers.TrainerCallback):
    """Notes how many rows were asked for by the end of training."""

    trainer: DistillTrainer

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        stats = self.trainer.label_stats()
        assert stats is not None
        self.rows = stats.rows_asked


@pytest.mark.parametrize(
    ("collate", "chunked"),
    [(collate_right, False), (collate_right, True), (collate_left, False), (collate_flat, False), (collate_flat, True)],
)
@pytest.mark.parametrize("batch", [22, 3])
def test_update_is_that_of_all_tokens(
    tmp_path: Path, teacher: LocalTeacher, collate: Any, batch: int, chunked: bool
) -> None:
    """One step over all texts: as a whole, or in micro-batches of unequal numbers of tokens."""
    student = small_model(2)
    loss = expected_loss(student, texts(), k=5, beta=0.5, hard=0.25)
    loss.backward()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter -= 0.5 * parameter.grad
    arguments = DistillArguments(top_k=5, beta=0.5, hard_weight=0.25, chunked_head=chunked)
    trainer = make(
        tmp_path,
        teacher,
        arguments,
        data_collator=collate,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=-(-22 // batch),
        lr_scheduler_type="constant",
        max_steps=1,
    )
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), abs=1e-5)
    torch.testing.assert_close(parameters(trainer.model), parameters(student), rtol=0, atol=1e-5)


def test_resumed_training_is_the_same(tmp_path: Path, teacher: LocalTeacher) -> None:
    """Whatever was trained before the checkpoint is not labelled again; dropout is the same."""
    settings: Any = {
        "save_strategy": "steps",
        "save_steps": 4,  # the first step of the second epoch
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 2,
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "eval_dataset": texts()[:6],
    }
    arguments = DistillArguments(top_k=4, hard_weight=0.1, eval_teachers=True, ahead=1)
    counted = Rows()
    ends = []
    for checkpoint in (None, str(tmp_path / "checkpoint-4")):
        model = small_model(2, attention_dropout=0.5)
        counted.trainer = trainer = make(tmp_path, teacher, arguments, model=model, callbacks=[counted], **settings)
        trainer.train(resume_from_checkpoint=checkpoint)
        ends.append((parameters(trainer.model), [line.get("eval_loss") for line in trainer.state.log_history]))
        tokens = sum(len(text["input_ids"]) for text in texts())
        assert counted.rows == 2 * tokens if checkpoint is None else 0 < counted.rows < tokens
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def test_evaluation_without_teachers(tmp_path: Path) -> None:
    """Its loss is the cross-entropy then, and no teacher has to be there."""
    trainer = make(tmp_path, "127.0.0.1:9", eval_dataset=texts())
    loss = trainer.evaluate()["eval_loss"]
    per_batch = [expected_loss(trainer.model, texts()[at : at + 8], k=2, beta=0, hard=1) for at in (0, 8, 16)]
    weights = torch.tensor([8.0, 8.0, 6.0])
    assert loss == pytest.approx((torch.stack(per_batch) * weights).sum().item() / 22, abs=1e-4)


class Interrupted(transformers.TrainerCallback):
    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt


def test_interrupt_lets_go(tmp_path: Path, teacher: LocalTeacher) -> None:
    trainer = make(tmp_path, teacher, callbacks=[Interrupted()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.label_stats() is None


def test_error_says_what_to_do(tmp_path: Path) -> None:
    trainer = make(tmp_path, "127.0.0.1:9", options=Options(teacher_timeout_s=0.5))
    with pytest.raises(NoTeacherError, match=r"127\.0\.0\.1:9"):
        trainer.train()


class Encoder(torch.nn.Module):  # type: ignore[misc]
    config = transformers.T5Config()

    def forward(self, input_ids: Any) -> None: ...


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"model": Encoder()}, "encoder and a decoder"),
        ({"inputs": "ids"}, "name further inputs"),
        ({"model": torch.nn.Linear(2, 2), "distill_args": DistillArguments(chunked_head=True)}, "no logits_to_keep"),
    ],
    ids=["smoothing", "encoder", "inputs", "head"],
)
def test_refuses_by_name(tmp_path: Path, settings: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        make(tmp_path, "127.0.0.1:9", **settings)


def test_needs_teachers(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="an empty list: a training without teachers"):
        make(tmp_path, [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("task", "seq2seq"),
        ("top_k", 0),
        ("beta", 1.5),
        ("temperature", 0),
        ("hard_weight", -1),
        ("chunked_head", True),
    ],
)
def test_arguments_that_cannot_be(name: str, value: Any) -> None:
    task: Any = {"task": "classification"} if name == "chunked_head" else {}
    with pytest.raises(SettingsError, match=name):
        DistillArguments(**task, **{name: value})


def test_arguments_from_a_command_line() -> None:
    parser = transformers.HfArgumentParser(DistillArguments)
    (found,) = parser.parse_args_into_dataclasses(["--beta", "0.5", "--top_k", "16", "--chunked_head"])
    assert found == DistillArguments(beta=0.5, top_k=16, chunked_head=True)
    (found,) = parser.parse_args_into_dataclasses(["--task", "classification", "--tokenizer", ""])
    assert (found.kept, found.output, found.tokenizer) == (None, "logits", "")


def test_soft_cap_is_found_out(tmp_path: Path, teacher: LocalTeacher) -> None:
    """A head alone does not make the logits of Gemma 2."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
        final_logit_softcapping=0.05,
    )
    model = transformers.Gemma2ForCausalLM(config)
    trainer = make(tmp_path, teacher, DistillArguments(top_k=8, chunked_head=True), model=model)
    with pytest.raises(SettingsError, match="soft cap"):
        trainer.train()
