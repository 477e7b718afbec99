"""The source code of Python's standard library as token ids: files, a tokenizer, windows, and batches of windows."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

WINDOW = 128
"""Tokens per window. A file is cut into windows, of which the last may be shorter."""
PADDING, END = "<padding>", "<end>"
NOT_LEARNED = -100  # the label that the loss in transformers ignores


def split_files(limit: int = 0) -> tuple[list[Path], list[Path]]:
    """Return the files to learn from, and every tenth of the library's modules, which are held out from all models.

    For a quick trial, `limit` is the number of files in each list; the shortest ones are held out.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_sysconfigdata"))
    held_out = files[::10]
    learned = [path for path in files if path not in held_out]
    if limit:
        return learned[:limit], sorted(held_out, key=lambda path: path.stat().st_size)[:limit]
    return learned, held_out


def train_tokenizer(files: Sequence[Path], size: int) -> Tokenizer:
    """Return a tokenizer trained on the files, with a vocabulary of at most `size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[PADDING, END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(path) for path in files], trainer)
    return tokenizer


def windows(files: Sequence[Path], tokenizer: Tokenizer) -> list[torch.Tensor]:
    """Cut the files, each followed by an end token, into windows int64 [tokens]."""
    end = tokenizer.token_to_id(END)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    tokens = [torch.tensor([*found.ids, end]) for found in tokenizer.encode_batch(texts)]
    return [window for of_file in tokens for window in of_file.split(WINDOW)]


def collate(sequences: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pad sequences of any lengths to a batch of tensors [sequences, longest]. The mask is 0 where they are padded."""
    ids = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(sequence) for sequence in sequences], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, NOT_LEARNED)}
