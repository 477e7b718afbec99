"""The source of Python's standard library as token ids: files, a tokenizer, windows of files, and batches of these."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

WINDOW = 128
"""Tokens of a window: a file is cut into these, and the last one is shorter."""
PADDING, END = "<padding>", "<end>"
NOT_LEARNED = -100  # what transformers leaves out of its loss


def split_files(limit: int = 0) -> tuple[list[Path], list[Path]]:
    """Return files to learn from, and every tenth of the library's modules, which no model sees.

    A limit is for trials: as many files of each, and of those held out the shortest.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_sysconfigdata"))
    held_out = files[::10]
    learned = [path for path in files if path not in held_out]
    if limit:
        return learned[:limit], sorted(held_out, key=lambda path: path.stat().st_size)[:limit]
    return learned, held_out


def train_tokenizer(files: Sequence[Path], size: int) -> Tokenizer:
    """Find the pieces of words, at most `size`, that the files are made of."""
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
    """Cut files, each with an end behind it, into windows int64 [tokens]."""
    end = tokenizer.token_to_id(END)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    tokens = [torch.tensor([*found.ids, end]) for found in tokenizer.encode_batch(texts)]
    return [window for of_file in tokens for window in of_file.split(WINDOW)]


def collate(sequences: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make a batch of sequences of any lengths, each [sequences, longest]: 0 in the mask is what was filled up."""
    ids = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(sequence) for sequence in sequences], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, NOT_LEARNED)}
