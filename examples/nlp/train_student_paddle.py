"""Trains a student in PaddlePaddle, with or without teachers, and with or without the unlabelled texts."""

import itertools
from collections.abc import Iterable, Iterator
from typing import TypeVar

import nets_paddle
import paddle
import settings
import texts
from tokenizers import Tokenizer

from edl.distill.cache import SoftLabelCache
from edl.distill.paddle import distill
from edl.distill.paddle_losses import DistillLoss

Item = TypeVar("Item")
options = settings.student_options(__doc__, ["bow"])
paddle.seed(options.seed)
parts = texts.load(options.data, options.labelled, options.unlabelled, options.seed)
tokenizer = Tokenizer.from_file(f"{options.tokenizer}/tokenizer.json")
dev, test = (texts.Encoded(part, tokenizer) for part in (parts.dev, parts.test))
loss_of = DistillLoss(temperature=2.0, alpha=0.5)


def batches(of: list[texts.Text]) -> paddle.io.DataLoader:
    return paddle.io.DataLoader(texts.Encoded(of, tokenizer), batch_size=64, shuffle=True, collate_fn=texts.collate)


def endless(loader: Iterable[Item]) -> Iterator[Item]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


def train(model: paddle.nn.Layer, labelled: Iterable[tuple[dict, paddle.Tensor | None]]) -> float:
    """Train on batches with soft labels or None, restore the weights that were best on `dev`, return their accuracy."""
    optimizer = paddle.optimizer.Adam(2e-3, parameters=model.parameters())
    best, weights = 0.0, {}
    for step, (batch, soft) in enumerate(itertools.islice(labelled, options.steps), 1):
        model.train()
        loss_of(model(paddle.to_tensor(batch["ids"])), soft, paddle.to_tensor(batch["labels"])).backward()
        optimizer.step()
        optimizer.clear_grad()
        if step % settings.CHECK_EVERY == 0 and (right := accuracy(model, dev)) > best:
            best, weights = right, {name: values.clone() for name, values in model.state_dict().items()}
    model.set_state_dict(weights)
    return best


@paddle.no_grad()
def predict(model: paddle.nn.Layer, batch: dict) -> paddle.Tensor:
    model.eval()
    return model(paddle.to_tensor(batch["ids"]))


def accuracy(model: paddle.nn.Layer, data: texts.Encoded) -> float:
    """Return the share of the texts that the model classifies correctly."""
    of_batches = paddle.io.DataLoader(data, batch_size=256, collate_fn=texts.collate)
    right = sum(int((predict(model, batch).argmax(1) == batch["labels"]).sum()) for batch in of_batches)
    return right / len(data)


def new_student() -> paddle.nn.Layer:
    return nets_paddle.BagOfWords(tokenizer.get_vocab_size())


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
