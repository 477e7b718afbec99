"""`DistillTrainer` with teachers: the update is that of all tokens, for all kinds of rows and students."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", "5.23", reason="transformers is not installed, or too old")

from edl.distill import Options  # noqa: E402
from edl.distill.compress import top_k  # noqa: E402
from edl.distill.losses import kl_divergence, token_loss  # noqa: E402
from edl.distill.transformers import DistillArguments, DistillTrainer  # noqa: E402
from edl.distill.transformers.student_loss import (  # noqa: E402
    all_classes,
    find_texts,
    learned_rows,
    next_tokens,
)
from edl.errors import EDLError, NoTeacherError, SettingsError  # noqa: E402
from edl.testing.models import prefix_scores_of  # noqa: E402
from edl_serving.backends import open_backends  # noqa: E402
from edl_serving.backends.source import ModelSource  # noqa: E402
from tests.fast.distill.conftest import Serve, Served  # noqa: E402
from tests.fast.distill.trainers.students import (  # noqa: E402
    SIZES,
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

ONE_STEP: Any = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 6, "max_steps": 1}


@pytest.fixture(scope="module")
def teacher() -> Iterator[str]:
    with contextlib.closing(Served("prefix_scores", vocabulary=VOCABULARY)) as served:
        yield served.endpoint


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for one another on a busy machine, for models as small as these
    yield
    torch.set_num_threads(threads)
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith(("edl-distill", "edl-feed"))]
    assert not left


def load(folder: Path, task: str) -> Any:
    (backend,) = open_backends(ModelSource("hf", str(folder), task=task, device="cpu", max_tokens=128))
    return backend


GIVEN = ("data_collator", "callbacks", "options", "eval_dataset", "processing_class", "columns", "inputs", "route")


def make(folder: Path, model: Any, teachers: Any, distill_args: Any = None, **settings: Any) -> DistillTrainer:
    """A trainer of one step over all texts in unequal batches, unless `settings` say otherwise."""
    given = {name: settings.pop(name) for name in GIVEN if name in settings}
    given.setdefault("data_collator", collate_right)
    data = settings.pop("data", None) or texts()
    return DistillTrainer(
        model,
        training_arguments(folder, **{**ONE_STEP, **settings}),
        train_dataset=data,
        teachers=teachers,
        distill_args=distill_args or DistillArguments(top_k=6),
        **given,
    )


def first_loss(*args: Any, **settings: Any) -> float:
    """Train; return the loss of the first step."""
    trainer = make(*args, **settings)
    trainer.train()
    return trainer.state.log_history[0]["loss"]


def mean_loss(of_text: Callable[[dict[str, Any]], Any]) -> Any:
    """The mean over the learned tokens of all texts, of each text's losses by token."""
    return torch.cat([of_text(sample) for sample in texts()]).mean()


@pytest.mark.parametrize(
    ("collate", "chunked", "batch"),
    [
        (collate_right, False, 22),
        (collate_right, True, 3),
        (collate_left, False, 3),
        (collate_flat, False, 3),
        (collate_flat, True, 22),
    ],
)
def test_update_is_that_of_all_tokens(tmp_path: Path, teacher: str, collate: Any, chunked: bool, batch: int) -> None:
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
        small_model(2),
        teacher,
        arguments,
        data_collator=collate,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=-(-22 // batch),
        lr_scheduler_type="constant",
    )
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), abs=1e-5)
    torch.testing.assert_close(parameters(trainer.model), parameters(student), rtol=0, atol=1e-5)


class Rows(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Notes how many rows were asked for by the end of training."""

    trainer: DistillTrainer

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        stats = self.trainer.label_stats()
        self.rows = stats.rows_asked


def test_resumed_training_is_the_same(tmp_path: Path, teacher: str) -> None:
    """Whatever was trained before the checkpoint is not labelled again; dropout is the same."""
    settings: Any = {
        "save_strategy": "steps",
        "save_steps": 4,  # the first step of the second epoch
        "max_steps": -1,
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
        counted.trainer = trainer = make(tmp_path, model, teacher, arguments, callbacks=[counted], **settings)
        trainer.train(resume_from_checkpoint=checkpoint)
        ends.append((parameters(trainer.model), [line.get("eval_loss") for line in trainer.state.log_history]))
        tokens = sum(len(text["input_ids"]) for text in texts())
        assert counted.rows == 2 * tokens if checkpoint is None else 0 < counted.rows < tokens
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def test_evaluation_without_teachers(tmp_path: Path) -> None:
    """Its loss is the cross-entropy then, and no teacher has to be there; training says what to do."""
    options = Options(teacher_timeout_s=0.3)
    trainer = make(tmp_path, small_model(2), "127.0.0.1:9", eval_dataset=texts(), options=options)
    loss = trainer.evaluate()["eval_loss"]
    per_batch = [expected_loss(trainer.model, texts()[at : at + 8], k=2, beta=0, hard=1) for at in (0, 8, 16)]
    weights = torch.tensor([8.0, 8.0, 6.0])
    assert loss == pytest.approx((torch.stack(per_batch) * weights).sum().item() / 22, abs=1e-4)
    with pytest.raises(NoTeacherError, match=r"127\.0\.0\.1:9"):
        trainer.train()


class Narrow(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Takes no other arguments, and returns logits alone."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_model(2)

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


@pytest.mark.parametrize("student", [small_model(2), Narrow()], ids=["llama", "narrow"])
def test_evaluation_without_labels(tmp_path: Path, teacher: str, student: Any) -> None:
    """Teachers' labels are enough for a loss."""
    data: Any = [{"input_ids": sample["input_ids"], "labels": sample["input_ids"]} for sample in texts()]

    def collate(samples: Any) -> Any:
        batch = collate_right([{"labels": sample["input_ids"], **sample} for sample in samples])
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}

    given: Any = {"eval_dataset": data, "data_collator": collate, "per_device_eval_batch_size": 22}
    trainer = make(tmp_path, student, teacher, DistillArguments(top_k=6, eval_teachers=True), **given)
    expected = expected_loss(small_model(2), data, k=6, beta=0, hard=0)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), abs=1e-4)
    batch, shape = collate(data), (22, 12, VOCABULARY)
    batch["teacher_labels"] = all_classes(torch.zeros(shape), 1.0)
    assert trainer.prediction_step(trainer.model, batch, False)[1].shape == shape


@pytest.mark.parametrize("derived", [False, True])
def test_ends_that_pad_are_learned(
    tmp_path: Path, teacher: str, caplog: pytest.LogCaptureFixture, derived: bool
) -> None:
    """transformers' collator leaves out the labels of token 3; another may do so on purpose."""
    tokenizer = tokenizer_of([f"w{number}" for number in range(VOCABULARY)])
    tokenizer.pad_token = tokenizer.eos_token = "w3"
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    data = [{"input_ids": [*text["input_ids"], 3]} for text in texts()]
    given: Any = {"data": data, "data_collator": (lambda samples: collator(samples)) if derived else collator}
    loss = first_loss(tmp_path, small_model(2), teacher, **given)
    for sample in data:
        sample["labels"] = [-100 if derived and token == 3 else token for token in sample["input_ids"]]
    assert loss == pytest.approx(expected_loss(small_model(2), data, k=6, beta=0, hard=0).item(), abs=1e-4)
    assert caplog.text.count("token 3 both pads and ends texts") == derived


# Other rows than the tokens of a causal language model.


def bert(kind: str, seed: int, **settings: Any) -> Any:
    torch.manual_seed(seed)
    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **settings)
    return getattr(transformers, kind)(config)


def classifier(seed: int) -> Any:
    return bert("BertForSequenceClassification", seed, num_labels=3)


def collate_classes(samples: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
    classes = torch.tensor([len(sample["input_ids"]) % 3 for sample in samples])
    return {**collate_right(samples), "labels": classes}


@pytest.mark.parametrize(("k", "hard"), [(None, 0.25), (2, 0.0)])
def test_classifier(tmp_path: Path, serve: Serve, k: int | None, hard: float) -> None:
    """Texts go to a real classifier of transformers; each of them weighs the same in a step of unequal batches."""
    classifier(1).save_pretrained(tmp_path / "teacher")
    served = serve(load(tmp_path / "teacher", "sequence-classification"))
    arguments = DistillArguments(task="classification", top_k=k, beta=0.5, temperature=2.0, hard_weight=hard)
    loss = first_loss(tmp_path, classifier(2), served.endpoint, arguments, data_collator=collate_classes)
    batch = collate_classes(texts())
    classes = batch.pop("labels")
    with torch.no_grad():
        logits, taught = classifier(2).eval()(**batch).logits, classifier(1).eval()(**batch).logits
    soft = token_loss(logits, top_k(taught.numpy(), k or 3, temperature=2.0), beta=0.5)
    expected = (1 - hard) * soft + hard * torch.nn.functional.cross_entropy(logits, classes)
    assert loss == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize("weight", [0.25, 1.0])
def test_samples_without_a_label(tmp_path: Path, weight: float) -> None:
    """Samples of -100 learn from the teacher alone, and do not count in the mean of the cross-entropy."""
    rng = torch.Generator().manual_seed(0)
    rows, taught = torch.randn(22, 4, generator=rng), torch.randn(22, 3, generator=rng)
    classes = torch.tensor([-100 if at % 2 or at < 9 else at % 3 for at in range(22)])
    data = [{"x": row, "labels": label} for row, label in zip(rows, classes, strict=True)]

    class Linear(torch.nn.Linear):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return {"logits": super().forward(x)}

    torch.manual_seed(0)
    student = Linear(4, 3)
    with torch.no_grad():
        logits = student(rows)["logits"]
    arguments = DistillArguments(task="classification", hard_weight=weight)
    trainer = make(tmp_path, student, "127.0.0.1:9", arguments, inputs={"x": "x"}, data=data)
    steps = [slice(at, at + 4) for at in range(0, 22, 4)]
    batches = [{"x": rows[step], "labels": classes[step]} for step in steps]
    count = trainer._get_num_items_in_batch(batches, torch.device("cpu"))
    losses = [
        trainer.compute_loss(student, {**batch, "teacher_labels": taught[step]}, num_items_in_batch=count)
        for step, batch in zip(steps, batches, strict=True)
    ]
    soft, hard = kl_divergence(logits, taught), torch.nn.functional.cross_entropy(logits, classes)
    torch.testing.assert_close(sum(losses).detach(), (1 - weight) * soft + weight * hard)


def test_masked_language_model(tmp_path: Path, teacher: str) -> None:
    """Row t predicts token t: labels are not shifted."""
    arguments = DistillArguments(task="masked-lm", top_k=6, hard_weight=0.25)
    loss = first_loss(tmp_path, bert("BertForMaskedLM", 2), teacher, arguments)

    def of_text(sample: dict[str, Any]) -> Any:
        own = torch.tensor(sample["labels"])
        with torch.no_grad():
            logits = bert("BertForMaskedLM", 2).eval()(torch.tensor([sample["input_ids"]])).logits[0]
        soft = token_loss(logits, top_k(prefix_scores_of(sample["input_ids"], VOCABULARY), 6), reduction="none")
        cross_entropy = torch.nn.functional.cross_entropy(logits, own, reduction="none")
        return (0.75 * soft + 0.25 * cross_entropy)[own != -100]

    assert loss == pytest.approx(mean_loss(of_text).item(), abs=1e-4)


def soft_loss(sample: dict[str, Any], shown: int = 0, sign: int = 1) -> Any:
    """Losses of a text's learned tokens, of which the student sees those that are `shown` further."""
    ids = torch.tensor([sample["input_ids"]])
    with torch.no_grad():
        logits = small_model(2)((ids + shown) % VOCABULARY).logits[0]
    labels = top_k(sign * prefix_scores_of(ids[0].numpy(), VOCABULARY), 6)
    return token_loss(logits, labels, reduction="none")[:-1][torch.tensor(sample["labels"])[1:] != -100]


def collate_for_both(samples: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
    """What teachers see is another text, of as many tokens, in a column that the student does not know."""
    batch = collate_right(samples)
    return {**batch, "teacher_ids": batch["input_ids"], "input_ids": (batch["input_ids"] + 7) % VOCABULARY}


class AnyArguments(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A wrapper that passes on whatever it gets."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        assert "teacher_ids" not in batch
        return self.model(**batch)


@pytest.mark.parametrize("named", [True, False])
def test_columns_of_teachers_are_kept(tmp_path: Path, teacher: str, named: bool) -> None:
    """A `forward(**batch)` does not say what the student takes: it gets all but `columns`."""
    given: Any = {"data_collator": collate_for_both, "inputs": {"ids": "teacher_ids"}}
    if not named:
        given |= {"inputs": {"ids": lambda batch: batch["teacher_ids"]}, "columns": ["teacher_ids"]}
        given["remove_unused_columns"] = False
    loss = first_loss(tmp_path, small_model(2) if named else AnyArguments(small_model(2)), teacher, **given)
    assert loss == pytest.approx(mean_loss(lambda sample: soft_loss(sample, 7)).item(), abs=1e-4)


def test_vocabularies_of_two_sizes(tmp_path: Path, serve: Serve) -> None:
    larger = serve("prefix_scores", vocabulary=VOCABULARY + 9).endpoint
    with pytest.raises(SettingsError, match="31 classes"):
        first_loss(tmp_path, small_model(2), larger)
    arguments: Any = {"top_k": 4, "padded_vocabulary": True, "hard_weight": 0.5}
    whole = first_loss(tmp_path, small_model(2), larger, DistillArguments(**arguments))
    chunked = first_loss(tmp_path, small_model(2), larger, DistillArguments(**arguments, chunked_head=True))
    assert chunked == pytest.approx(whole, abs=1e-5)


# What is refused, and with which words.


class Encoder(torch.nn.Module):  # type: ignore[misc, name-defined]
    config = transformers.T5Config()

    def forward(self, input_ids: Any) -> None: ...


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"model": Encoder()}, "is an encoder-decoder"),
        ({"inputs": "ids"}, "pass further inputs"),
        ({"model": torch.nn.Linear(2, 2), "distill_args": DistillArguments(chunked_head=True)}, "no logits_to_keep"),
        ({"teachers": []}, "an empty list: use transformers.Trainer"),
    ],
    ids=["smoothing", "encoder", "inputs", "head", "teachers"],
)
def test_refuses_by_name(tmp_path: Path, settings: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        make(tmp_path, **{"model": small_model(2), "teachers": "127.0.0.1:9", **settings})


@pytest.mark.parametrize(
    ("name", "value"),
    [("task", "seq2seq"), ("top_k", 0), ("beta", 1.5), ("temperature", 0), ("hard_weight", -1), ("chunked_head", True)],
)
def test_arguments_that_cannot_be(name: str, value: Any) -> None:
    task: Any = {"task": "classification"} if name == "chunked_head" else {}
    with pytest.raises(SettingsError, match=name):
        DistillArguments(**task, **{name: value})


def test_arguments_from_a_command_line() -> None:
    parser = transformers.HfArgumentParser(DistillArguments)
    (found,) = parser.parse_args_into_dataclasses(["--beta", "0.5", "--top_k", "16", "--chunked_head"])
    assert found == DistillArguments(beta=0.5, top_k=16, chunked_head=True)


def test_soft_cap_is_found_out(tmp_path: Path, teacher: str) -> None:
    """A head alone does not make the logits of Gemma 2."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=4, final_logit_softcapping=0.05)
    arguments = DistillArguments(top_k=8, chunked_head=True)
    with pytest.raises(SettingsError, match="soft cap"):
        first_loss(tmp_path, transformers.Gemma2ForCausalLM(config), teacher, arguments)


def test_pairs_of_texts_are_refused(tmp_path: Path, teacher: str) -> None:
    """Also where the student has no token types, so that the Trainer would leave them out of the batch."""
    pair = {"input_ids": [1, 2, 3, 4], "token_type_ids": [0, 0, 1, 1], "labels": [1, 2, 3, 4]}
    collator = transformers.default_data_collator
    arguments = DistillArguments(task="masked-lm", top_k=4)
    for model in (bert("BertForMaskedLM", 2), small_model(2)):
        with pytest.raises(SettingsError, match="token_type_ids contain 1"):
            first_loss(tmp_path, model, teacher, arguments, data=[pair] * 8, data_collator=collator)


def tokenizer_of(words: list[str]) -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    ids = {word: number for number, word in enumerate(words)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token=words[0]))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token=words[0])


def test_another_tokenizer_is_refused(tmp_path: Path, serve: Serve) -> None:
    """That of `processing_class` is compared unless another is named."""
    words = [f"w{number}" for number in range(VOCABULARY)]
    small_model(1).save_pretrained(tmp_path / "teacher")
    tokenizer_of(words).save_pretrained(tmp_path / "teacher")
    served = serve(load(tmp_path / "teacher", "causal-lm")).endpoint
    first_loss(tmp_path, small_model(2), served, processing_class=tokenizer_of(words))
    other: Any = {"processing_class": tokenizer_of(words[::-1]), "options": Options(teacher_timeout_s=1)}
    with pytest.raises(EDLError, match="tokenizer"):
        first_loss(tmp_path, small_model(2), served, **other)
    first_loss(tmp_path, small_model(2), served, DistillArguments(top_k=4, tokenizer=""), **other)


# Where texts begin in batches of collators, and what of them is learned.

IDS = [[5, 6, 7, 8, 9, 4]]


def batch(**fields: Any) -> dict[str, Any]:
    return {name: torch.tensor(value) for name, value in {"input_ids": IDS, **fields}.items()}


@pytest.mark.parametrize("first", [0, 2])
def test_packed_texts_are_taken_apart(first: int) -> None:
    positions = [[first + at for at in (0, 1, 2, 0, 0, 1)]]
    found = find_texts(batch(position_ids=positions))
    assert found.packed
    parts = [ids[kept != 0].tolist() for ids, kept in zip(found.ids, found.mask, strict=True)]
    assert parts == [[5, 6, 7], [8], [9, 4]]
    learned = learned_rows(batch(position_ids=positions), shifted=True)
    assert learned.tolist() == [[True, True, False, False, True, False]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"position_ids": [[0, 1, 2, 0, 1, 2]], "attention_mask": [[1] * 6]}, "attend across"),
        ({"position_ids": [[0, 1, 2, 5, 6, 7]]}, "begin at"),
        ({"position_ids": [[[0, 1, 2, 3, 4, 5]]]}, "one for each token"),
        ({"cu_seq_lens_q": [0, 3, 6]}, "no position_ids"),
        ({"input_ids": [1, 2, 3]}, "shape"),
    ],
    ids=["both", "jump", "three axes", "boundaries", "one axis"],
)
def test_texts_that_cannot_be_told_apart(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        find_texts(batch(**fields))
    with pytest.raises(SettingsError, match="inputs_embeds"):
        find_texts({"inputs_embeds": torch.zeros(1, 2, 3)})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"position_ids": [[0, 1, 2, 3, 4, 5]]},
        {"attention_mask": [[0, 0, 1, 1, 1, 1]], "position_ids": [[1, 1, 0, 1, 2, 3]]},
    ],
    ids=["alone", "positions", "left"],
)
def test_rows_of_one_text(fields: dict[str, Any]) -> None:
    found = find_texts(batch(**fields))
    assert not found.packed
    assert np.array_equal(found.ids, IDS)
    assert found.mask.tolist() == fields.get("attention_mask", [[1] * 6])


def test_what_is_learned() -> None:
    left = {"attention_mask": [[0, 0, 1, 1, 1, 1]]}
    assert learned_rows(batch(**left), shifted=True).tolist() == [[False, False, True, True, True, False]]
    own = {"labels": [[-100, -100, 7, 8, -100, 4]]}
    assert learned_rows(batch(**own), shifted=True).tolist() == [[False, True, True, False, True, False]]
    assert learned_rows(batch(**own), shifted=False).tolist() == [[False, False, True, True, False, True]]
    given = {"shift_labels": [[6, -100, 8, -100, -100, -100]], **own}
    assert next_tokens(batch(**given), shifted=True).tolist() == given["shift_labels"]
