"""`DistillTrainer` with other rows than the tokens of a causal language model, and with odd students and teachers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", "5.23", reason="transformers is not installed, or too old")

from edl.distill import Options  # noqa: E402
from edl.distill.compress import TopK, top_k  # noqa: E402
from edl.distill.losses import kl_divergence, token_loss  # noqa: E402
from edl.distill.transformers import DistillArguments, DistillTrainer  # noqa: E402
from edl.distill.transformers.student_loss import all_classes, hard_labels, student_loss  # noqa: E402
from edl.errors import EDLError, SettingsError  # noqa: E402
from edl.testing import LocalTeacher  # noqa: E402
from edl.testing.models import prefix_scores_of  # noqa: E402
from tests.fast.serving.backends.hf.test_oracle import load  # noqa: E402
from tests.fast.distill.sequences.language_model import NegativeModel  # noqa: E402
from tests.fast.distill.trainers.students import (  # noqa: E402
    VOCABULARY,
    collate_right,
    expected_loss,
    parameters,
    small_model,
    texts,
    training_arguments,
)
from tests.fast.serving.conftest import Inside  # noqa: E402

SIZES: Any = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
}
ONE_STEP: Any = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 6, "max_steps": 1}


@pytest.fixture(scope="module")
def teacher() -> Iterator[str]:
    with LocalTeacher("prefix_scores", vocabulary=VOCABULARY) as found:
        yield found.endpoint


def first_loss(folder: Path, model: Any, teacher: Any, distill_args: DistillArguments, **settings: Any) -> float:
    """Train; return the loss of the first step."""
    names = ("data_collator", "inputs", "columns", "processing_class", "callbacks", "options")
    given = {name: settings.pop(name) for name in names if name in settings}
    given.setdefault("data_collator", collate_right)
    trainer = DistillTrainer(
        model,
        training_arguments(folder, **{**ONE_STEP, **settings}),
        train_dataset=texts(),
        teachers=teacher,
        distill_args=distill_args,
        **given,
    )
    trainer.train()
    loss: float = trainer.state.log_history[0]["loss"]
    return loss


def bert(kind: str, seed: int, **settings: Any) -> Any:
    torch.manual_seed(seed)
    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **settings)
    return getattr(transformers, kind)(config)


def collate_classes(samples: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
    batch = collate_right(samples)
    classes = torch.tensor([len(sample["input_ids"]) % 3 for sample in samples])
    return {**batch, "labels": classes}


@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("hard", [0.0, 0.25])
def test_classifier(tmp_path: Path, k: int | None, hard: float) -> None:
    """Texts go to a real classifier of transformers; each of them weighs the same in a step of unequal batches."""
    bert("BertForSequenceClassification", 1, num_labels=3).save_pretrained(tmp_path / "teacher")
    server = Inside(load(tmp_path / "teacher", "sequence-classification", max_tokens=128))
    arguments = DistillArguments(task="classification", top_k=k, beta=0.5, temperature=2.0, hard_weight=hard)
    try:
        student = bert("BertForSequenceClassification", 2, num_labels=3)
        loss = first_loss(tmp_path, student, server.target, arguments, data_collator=collate_classes)
    finally:
        server.close()
    batch = collate_classes(texts())
    classes = batch.pop("labels")
    with torch.no_grad():
        logits = bert("BertForSequenceClassification", 2, num_labels=3).eval()(**batch).logits
        taught = bert("BertForSequenceClassification", 1, num_labels=3).eval()(**batch).logits
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
    trainer = DistillTrainer(
        student,
        training_arguments(tmp_path, **ONE_STEP, train_sampling_strategy="sequential"),
        train_dataset=data,
        teachers="127.0.0.1:9",
        inputs={"x": "x"},
        distill_args=arguments,
    )
    steps = [slice(at, at + 4) for at in range(0, 22, 4)]
    batches = [{"x": rows[step], "labels": classes[step]} for step in steps]
    count = trainer._get_num_items_in_batch(batches, torch.device("cpu"))
    losses = [
        trainer.compute_loss(student, {**batch, "teacher_labels": taught[step]}, num_items_in_batch=count)
        for step, batch in zip(steps, batches, strict=True)
    ]
    soft, hard = kl_divergence(logits, taught), torch.nn.functional.cross_entropy(logits, classes)
    torch.testing.assert_close(sum(losses).detach(), (1 - weight) * soft + weight * hard)


@pytest.mark.parametrize(("wrong", "words"), [(-1, "hold -1.* 0 to 2"), (3, "hold 3.* 0 to 2")])
def test_labels_of_no_class(wrong: int, words: str) -> None:
    arguments = DistillArguments(task="classification", hard_weight=0.5)
    with pytest.raises(SettingsError, match=words):
        student_loss(
            arguments, {"labels": torch.tensor([0, wrong])}, all_classes(torch.randn(2, 3), 1.0), 2, torch.randn(2, 3)
        )
    tokens = {"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[1, wrong]])}
    with pytest.raises(SettingsError, match=words):
        hard_labels(DistillArguments(hard_weight=0.5), tokens, 3)


def test_whole_logits_are_the_kl_divergence() -> None:
    student, taught = torch.randn(2, 5, 7)
    whole = token_loss(student, all_classes(taught, 3.0))
    torch.testing.assert_close(whole, kl_divergence(student, taught, temperature=3.0))


def test_masked_language_model(tmp_path: Path, teacher: str) -> None:
    """Row t predicts token t: labels are not shifted."""
    loss = first_loss(
        tmp_path, bert("BertForMaskedLM", 2), teacher, DistillArguments(task="masked-lm", top_k=6, hard_weight=0.25)
    )
    losses = []
    for sample in texts():
        own = torch.tensor(sample["labels"])
        with torch.no_grad():
            logits = bert("BertForMaskedLM", 2).eval()(torch.tensor([sample["input_ids"]])).logits[0]
        soft = token_loss(logits, top_k(prefix_scores_of(sample["input_ids"], VOCABULARY), 6), reduction="none")
        cross_entropy = torch.nn.functional.cross_entropy(logits, own, reduction="none")
        losses.append((0.75 * soft + 0.25 * cross_entropy)[own != -100])
    assert loss == pytest.approx(torch.cat(losses).mean().item(), abs=1e-4)


def collate_for_both(samples: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
    """What teachers see is another text, of as many tokens, in a column that the student does not know."""
    batch = collate_right(samples)
    return {**batch, "teacher_ids": batch["input_ids"], "input_ids": (batch["input_ids"] + 7) % VOCABULARY}


@pytest.mark.parametrize("named", [True, False])
def test_columns_of_teachers_are_kept(tmp_path: Path, teacher: str, named: bool) -> None:
    inputs: Any = {"ids": "teacher_ids" if named else lambda batch: batch["teacher_ids"]}
    columns = [] if named else ["teacher_ids"]
    arguments = DistillArguments(top_k=6)
    given: Any = {"data_collator": collate_for_both, "inputs": inputs, "columns": columns}
    loss = first_loss(tmp_path, small_model(2), teacher, arguments, **given)

    def expected(sample: dict[str, list[int]]) -> Any:
        ids = torch.tensor([sample["input_ids"]])
        with torch.no_grad():
            logits = small_model(2)((ids + 7) % VOCABULARY).logits[0]
        soft = token_loss(logits, top_k(prefix_scores_of(ids[0].numpy(), VOCABULARY), 6), reduction="none")
        return soft[:-1][torch.tensor(sample["labels"])[1:] != -100]

    assert loss == pytest.approx(torch.cat([expected(sample) for sample in texts()]).mean().item(), abs=1e-4)


@pytest.mark.parametrize("named", [True, False])
def test_domains_have_their_own_teachers(tmp_path: Path, teacher: str, named: bool) -> None:
    """A text of one domain is learned of one teacher, of the other domain of another, whatever batch it is in."""
    samples = [{**text, "domain": at % 3 % 2} for at, text in enumerate(texts())]

    def collate(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {**collate_right(found), "domain": torch.tensor([sample["domain"] for sample in found])}

    negative = Inside(NegativeModel(), max_batch_rows=512)
    try:
        trainer = DistillTrainer(
            small_model(2),
            training_arguments(tmp_path, **ONE_STEP),
            train_dataset=samples,
            data_collator=collate,
            teachers={0: teacher, None: negative.target},
            route="domain" if named else lambda batch: batch["domain"],
            columns=[] if named else ["domain"],
            distill_args=DistillArguments(top_k=6),
        )
        trainer.train()
    finally:
        negative.close()

    def expected(sample: dict[str, Any]) -> Any:
        ids = torch.tensor([sample["input_ids"]])
        with torch.no_grad():
            logits = small_model(2)(ids).logits[0]
        scores = prefix_scores_of(ids[0].numpy(), VOCABULARY) * (1 - 2 * sample["domain"])
        return token_loss(logits, top_k(scores, 6), reduction="none")[:-1][torch.tensor(sample["labels"])[1:] != -100]

    losses = torch.cat([expected(sample) for sample in samples])
    assert trainer.state.log_history[0]["loss"] == pytest.approx(losses.mean().item(), abs=1e-4)


class AnyArguments(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A wrapper that passes on whatever it gets."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        assert "teacher_ids" not in batch
        return self.model(**batch)


def test_wrapper_gets_what_is_named(tmp_path: Path, teacher: str) -> None:
    """A `forward(**batch)` does not say what the student takes: it gets all but `columns`."""
    arguments = DistillArguments(top_k=6)
    given: Any = {"data_collator": collate_for_both, "columns": ["teacher_ids"], "inputs": {"ids": "input_ids"}}
    given["remove_unused_columns"] = False
    loss = first_loss(tmp_path, AnyArguments(small_model(2)), teacher, arguments, **given)
    assert loss == pytest.approx(first_loss(tmp_path, small_model(2), teacher, arguments, **given), abs=1e-5)


def test_labels_move_batch_by_batch(tmp_path: Path, teacher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels of a whole step are never on the device together."""
    moved, taken, move, take = [0], [], TopK.to, DistillTrainer.get_batch_samples

    def count_moves(labels: TopK, *args: Any, **kwargs: Any) -> TopK:
        moved[0] += 1
        return move(labels, *args, **kwargs)

    def note_moves(*args: Any) -> Any:
        found = take(*args)
        taken.append(moved[0])
        return found

    monkeypatch.setattr(TopK, "to", count_moves)
    monkeypatch.setattr(DistillTrainer, "get_batch_samples", note_moves)
    first_loss(tmp_path, small_model(2), teacher, DistillArguments(top_k=4))
    assert (taken, moved) == ([0], [6])


def test_vocabularies_of_two_sizes(tmp_path: Path) -> None:
    with LocalTeacher("prefix_scores", vocabulary=VOCABULARY + 9) as larger:
        with pytest.raises(SettingsError, match="31 classes"):
            first_loss(tmp_path, small_model(2), larger.endpoint, DistillArguments(top_k=4))
        arguments = DistillArguments(top_k=4, padded_vocabulary=True, hard_weight=0.5)
        whole = first_loss(tmp_path, small_model(2), larger.endpoint, arguments)
        chunked = DistillArguments(top_k=4, padded_vocabulary=True, hard_weight=0.5, chunked_head=True)
        assert first_loss(tmp_path, small_model(2), larger.endpoint, chunked) == pytest.approx(whole, abs=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it compiles
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"bf16": True},
        {"activation_checkpointing": True},
        pytest.param({"torch_compile": True, "torch_compile_backend": "aot_eager"}, marks=pytest.mark.slow),
        {"eval_on_start": False, "dataloader_num_workers": 1},
    ],
    ids=["bf16", "checkpointing", "compile", "workers"],
)
def test_ways_to_train(tmp_path: Path, teacher: str, settings: dict[str, Any], chunked: bool) -> None:
    arguments = DistillArguments(top_k=5, beta=0.5, hard_weight=0.25, chunked_head=chunked)
    expected = expected_loss(small_model(2), texts(), k=5, beta=0.5, hard=0.25).item()
    loss = first_loss(tmp_path, small_model(2), teacher, arguments, **settings)
    assert loss == pytest.approx(expected, abs=2e-2 if "bf16" in settings else 1e-4)


def test_experts_are_used_alike(tmp_path: Path, teacher: str) -> None:
    """What a router adds to the loss is in it, as the mean over micro-batches."""

    def mixtral(coefficient: float) -> Any:
        torch.manual_seed(0)
        config = transformers.MixtralConfig(
            **SIZES,
            num_key_value_heads=2,
            num_local_experts=4,
            output_router_logits=True,
            router_aux_loss_coef=coefficient,
        )
        return transformers.MixtralForCausalLM(config)

    def router_share(processes: int, training: bool) -> float:
        """What the coefficient of 1 adds to the loss of a micro-batch, of two in a step."""
        losses = []
        for share in (0.0, 1.0):
            given: Any = {"teachers": teacher, "distill_args": DistillArguments(top_k=4), "train_dataset": texts()}
            trainer = DistillTrainer(mixtral(share).train(training), training_arguments(tmp_path), **given)
            trainer.current_gradient_accumulation_steps = 2
            trainer.accelerator = SimpleNamespace(num_processes=processes)
            batch = collate_right(texts(2))
            labels = top_k(np.zeros((*batch["input_ids"].shape, VOCABULARY), np.float32), 4).map(torch.from_numpy)
            losses.append(
                trainer.compute_loss(
                    trainer.model, {**batch, "teacher_labels": labels}, num_items_in_batch=torch.tensor(9)
                )
            )
        return float((losses[1] - losses[0]).detach())

    assert router_share(2, True) == pytest.approx(router_share(1, True), abs=1e-4), "processes average it"
    assert router_share(1, False) == pytest.approx(2 * router_share(1, True), abs=1e-4), "no steps in an evaluation"
    without, with_it = (
        first_loss(tmp_path, mixtral(share), teacher, DistillArguments(top_k=4)) for share in (0.0, 1.0)
    )
    assert 1.0 < with_it - without < 8.0  # at least the 2 of 4 experts that a token has, where all are used alike


class Pairs(torch.utils.data.Dataset[Any]):  # type: ignore[misc, name-defined]
    """Pairs of texts, with the token types that a tokenizer gives them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> dict[str, list[int]]:
        return {"input_ids": [1, 2, 3, 4], "token_type_ids": [0, 0, 1, 1], "labels": [1, 2, 3, 4]}


def test_pairs_of_texts_are_refused(tmp_path: Path, teacher: str) -> None:
    """Also where the student has no token types, so that the Trainer would leave them out of the batch."""
    models: list[Any] = [bert("BertForMaskedLM", 2), small_model(2)]
    for model in models:
        trainer = DistillTrainer(
            model,
            training_arguments(tmp_path, **ONE_STEP),
            train_dataset=Pairs(),
            data_collator=transformers.default_data_collator,
            teachers=teacher,
            distill_args=DistillArguments(task="masked-lm", top_k=4),
        )
        with pytest.raises(SettingsError, match="token_type_ids hold 1"):
            trainer.train()


class Killer(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    def __init__(self, teacher: LocalTeacher) -> None:
        self._teacher = teacher

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self._teacher.kill()


def test_teacher_killed_meanwhile(tmp_path: Path, teacher: str) -> None:
    settings: Any = {"max_steps": 12, "gradient_accumulation_steps": 1}
    models = [small_model(2), small_model(2)]
    with LocalTeacher("prefix_scores", vocabulary=VOCABULARY) as other:
        arguments = DistillArguments(top_k=5, ahead=2)
        first_loss(tmp_path, models[0], f"{other.endpoint},{teacher}", arguments, callbacks=[Killer(other)], **settings)
    first_loss(tmp_path, models[1], teacher, arguments, **settings)
    assert torch.equal(parameters(models[0]), parameters(models[1]))


def tokenizer_of(words: list[str]) -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    ids = {word: number for number, word in enumerate(words)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token=words[0]))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token=words[0])


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """That of `processing_class` is compared unless another is named."""
    words = [f"w{number}" for number in range(VOCABULARY)]
    small_model(1).save_pretrained(tmp_path / "teacher")
    tokenizer_of(words).save_pretrained(tmp_path / "teacher")
    server = Inside(load(tmp_path / "teacher", "causal-lm", max_tokens=128))
    other: Any = {"processing_class": tokenizer_of(words[::-1]), "options": Options(teacher_timeout_s=5)}
    try:
        first_loss(
            tmp_path, small_model(2), server.target, DistillArguments(top_k=4), processing_class=tokenizer_of(words)
        )
        with pytest.raises(EDLError, match="tokenizer"):
            first_loss(tmp_path, small_model(2), server.target, DistillArguments(top_k=4), **other)
        arguments = DistillArguments(top_k=4, tokenizer="")
        first_loss(tmp_path, small_model(2), server.target, arguments, **other)
    finally:
        server.close()
