"""The token count under Hugging Face's Trainer: accumulated micro-batches make the update of the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from edl.distill.compress import top_k  # noqa: E402
from edl.distill.losses import chunked_token_loss, token_loss  # noqa: E402

VOCABULARY = 31


def small_model(seed: int) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )


def texts() -> list[list[int]]:
    """Sequences of 3 to 12 tokens, so that micro-batches have unequal numbers of them."""
    rng = np.random.default_rng(0)
    return [rng.integers(1, VOCABULARY, length).tolist() for length in (3, 12, 5, 7)]


def collate(samples: list[dict[str, list[int]]]) -> dict[str, Any]:
    """Pad to the longest; the first token of each is a prompt."""
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    labels[:, :2] = -100
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def updated(folder: Path, batch: int) -> Any:
    """Train a step over all samples in micro-batches of `batch`; return the parameters."""
    teacher = small_model(1).eval()

    class Student(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            mask = torch.zeros_like(labels, dtype=torch.bool)
            mask[:, :-1] = labels[:, 1:] != -100
            with torch.no_grad():
                soft = top_k(teacher(**inputs).logits.numpy(), 5)
            settings: Any = {"mask": mask, "beta": 0.5, "token_count": num_items_in_batch}
            whole = token_loss(model(**inputs).logits, soft, **settings)
            hidden = model.model(**inputs).last_hidden_state
            loss = chunked_token_loss(hidden, model.lm_head, soft, chunk_tokens=3, **settings)
            torch.testing.assert_close(loss, whole)
            return loss

    student = small_model(2)
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=4 // batch,
        max_steps=1,
        optim="sgd",
        learning_rate=10.0,
        max_grad_norm=0,
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": text} for text in texts()]
    Student(student, arguments, data_collator=collate, train_dataset=data).train()
    return torch.cat([parameter.detach().flatten() for parameter in student.parameters()])


def test_micro_batches_make_the_whole(tmp_path: Path) -> None:
    before = torch.cat([parameter.detach().flatten() for parameter in small_model(2).parameters()])
    whole = updated(tmp_path, 4)
    assert (whole - before).abs().max() > 1e-3
    torch.testing.assert_close(updated(tmp_path, 1), whole, rtol=0, atol=1e-6)
