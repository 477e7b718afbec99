"""Reads short texts with a sentiment, decides which model sees which labels, and makes batches of token ids."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import BertWordPieceTokenizer, Tokenizer

LONGEST = 64
"""Most tokens per text. Longer texts are cut off."""
NO_LABEL = -100
"""The label that losses ignore."""
NAMES = ("train", "dev", "test")


@dataclass(frozen=True)
class Text:
    """A text, labelled 1 for a good opinion and 0 for a bad one. `number` is its line in the file."""

    number: int
    words: str
    label: int


@dataclass(frozen=True)
class Parts:
    """Texts, grouped by which model sees their labels.

    Students see the labels of `labelled`. The teacher sees those of `labelled` and of `teachers_own`, which no student
    sees. No model sees those of `unlabelled`. `dev` chooses the best step, `test` measures a model.
    """

    labelled: list[Text]
    teachers_own: list[Text]
    unlabelled: list[Text]
    dev: list[Text]
    test: list[Text]


def load(folder: str | None, labelled: int, unlabelled: int, seed: int) -> Parts:
    """Read train.tsv, dev.tsv and test.tsv (a text, a tab, 0 or 1), and draw which model sees which labels."""
    train, dev, test = (_read(Path(folder) / f"{name}.tsv") if folder else _made_up(name) for name in NAMES)
    if labelled + unlabelled >= len(train):
        raise SystemExit(f"{len(train)} texts: too few for {labelled} with labels and {unlabelled} without")
    random.Random(seed).shuffle(train)
    few, rest = train[:labelled], train[labelled:]
    unknown = [Text(text.number, text.words, NO_LABEL) for text in rest[:unlabelled]]
    return Parts(few, rest[unlabelled:], unknown, dev, test)


def train_tokenizer(texts: list[Text], words: int) -> Tokenizer:
    """Return a tokenizer trained on the texts."""
    pieces = BertWordPieceTokenizer()
    pieces.train_from_iterator([text.words for text in texts], vocab_size=words, show_progress=False)
    wrapped = BertWordPieceTokenizer(pieces.get_vocab())  # its vocabulary has [CLS] and [SEP], so it adds them to texts
    return Tokenizer.from_str(wrapped.to_str())


class Encoded:
    """Texts as token ids, a data set for PyTorch's and PaddlePaddle's loaders."""

    def __init__(self, texts: list[Text], tokenizer: Tokenizer) -> None:
        self._texts = texts
        tokenizer.enable_truncation(LONGEST)
        self._ids = [np.array(tokenizer.encode(text.words).ids) for text in texts]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> tuple[Text, np.ndarray]:
        return self._texts[index], self._ids[index]


def collate(samples: list[tuple[Text, np.ndarray]]) -> dict[str, Any]:
    """Make a batch: ids int64 [rows, longest] for the student, padded with 0, and bytes for its teachers."""
    texts, ids = zip(*samples, strict=True)
    padded = np.zeros((len(ids), max(map(len, ids))), np.int64)
    for row, of_text in zip(padded, ids, strict=True):
        row[: len(of_text)] = of_text
    return {
        "ids": padded,
        "labels": np.array([text.label for text in texts]),
        "text": [of_text.astype("<i4").tobytes() for of_text in ids],  # the format that `edl serve --hf` takes
        "number": [text.number for text in texts],
    }


_OPINIONS = (("dull", "awful", "a mess", "tired", "a bore"), ("fine", "moving", "a joy", "fresh", "a delight"))
_SUBJECTS = ("the film", "the plot", "its cast", "the music", "the ending", "this comedy")


def _read(path: Path) -> list[Text]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Text(number, *_cells(line, path, number)) for number, line in enumerate(lines)]


def _cells(line: str, path: Path, number: int) -> tuple[str, int]:
    words, _, label = line.rpartition("\t")
    if label not in ("0", "1"):
        raise SystemExit(f"{path}, line {number + 1}: expected a text, a tab, and 0 or 1, got {line!r}")
    return words, int(label)


def _made_up(name: str) -> list[Text]:
    """Return made-up sentences, for trials without a folder. In some of them, "not" reverses the opinion."""
    draw = random.Random(name)
    texts = []
    for number in range(3000 if name == "train" else 300):
        label, negated = draw.randrange(2), draw.random() < 0.3
        said = draw.choice(_OPINIONS[label ^ negated])
        words = f"{draw.choice(_SUBJECTS)} is {'not ' * negated}{said} , and {draw.choice(_SUBJECTS)} goes on"
        texts.append(Text(number, words, label))
    return texts
