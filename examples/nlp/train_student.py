"""Trains a student, with or without teachers, and with or without the unlabelled texts."""

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import TypeVar

import nets
import settings
import texts
import torch
from tokenizers import Tokenizer
from torch import nn
from torch.utils.data import DataLoader

from edl.distill.cache import SoftLabelCache
from edl.distill.losses import DistillLoss
from edl.distill.torch import distill

Item = TypeVar("Item")
options = settings.student_options(__doc__, sorted(nets.STUDENTS))
torch.manual_seed(options.seed)
parts = texts.load(options.data, options.labelled, options.unlabelled, options.seed)
tokenizer = Tokenizer.from_file(f"{options.tokenizer}/tokenizer.json")
dev, test = (texts.Encoded(part, tokenizer) for part in (parts.dev, parts.test))
loss_of = DistillLoss(temperature=2.0, alpha=0.5)


def batches(of: list[texts.Text]) -> DataLoader:
    return DataLoader(texts.Encoded(of, tokenizer), batch_size=64, shuffle=True, collate_fn=texts.collate)


def endless(loader: Iterable[Item]) -> Iterator[Item]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


def train(model: nn.Module, labelled: Iterable[tuple[dict, torch.Tensor | None]]) -> float:
    """Train on batches with soft labels or None, restore the weights that were best on `dev`, return their accuracy."""
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    best, weights = 0.0, {}
    for step, (batch, soft) in enumerate(itertools.islice(labelled, options.steps), 1):
        logits, labels = model.train()(torch.from_numpy(batch["ids"])), torch.from_numpy(batch["labels"])
        loss = loss_of(logits, soft, labels)  # the cross-entropy if there are no soft labels
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % settings.CHECK_EVERY == 0 and (right := accuracy(model, dev)) > best:
            best, weights = right, copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)
    return best


@torch.no_grad()
def predict(model: nn.Module, batch: dict) -> torch.Tensor:
    return model.eval()(torch.from_numpy(batch["ids"]))


def accuracy(model: nn.Module, data: texts.Encoded) -> float:
    """Return the share of the texts that the model classifies correctly."""
    of_batches = DataLoader(data, batch_size=256, collate_fn=texts.collate)
    right = sum(int((predict(model, batch).argmax(1).numpy() == batch["labels"]).sum()) for batch in of_batches)
    return right / len(data)


def new_student() -> nn.Module:
    return nets.STUDENTS[options.net](tokenizer.get_vocab_size())


model, asked = new_student(), 0
source = batches(parts.labelled + parts.unlabelled if options.more_text else parts.labelled)
if options.teachers:
    cache = SoftLabelCache() if options.cache else None
    with distill(
        source,
        options.teachers,
        inputs={"ids": "text"},
        outputs="logits",
        discovery=options.store,
        cache=cache,
        ids="number" if cache else None,
        dataset=f"train.tsv of {options.data}",
    ) as taught:
        on_dev = train(model, endless(taught))
        asked = taught.stats().rows_asked
else:
    on_dev = train(model, ((batch, None) for batch in endless(batches(parts.labelled))))
    if options.more_text:  # without a teacher, the student labels the texts for a new student
        before, model = model, new_student()
        on_dev = train(model, ((batch, predict(before, batch)) for batch in endless(source)))
settings.keep_student(options, on_dev, accuracy(model, test), asked)
