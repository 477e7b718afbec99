"""Trains a small BERT from scratch on all labels, and writes it and its tokenizer."""

import copy

import settings
import texts
import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

parser = settings.parser_of(__doc__)
parser.add_argument("--words", type=int, default=8000, help="largest size of the vocabulary (%(default)s)")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--out", default="teacher")
options = parser.parse_args()

torch.manual_seed(options.seed)
parts = texts.load(options.data, options.labelled, options.unlabelled, options.seed)
known = parts.labelled + parts.teachers_own
tokenizer = texts.train_tokenizer(known + parts.unlabelled, options.words)
train, dev, test = (texts.Encoded(part, tokenizer) for part in (known, parts.dev, parts.test))
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=texts.LONGEST,
        hidden_dropout_prob=0.3,
        num_labels=2,
    )
)


def logits_of(batch: dict) -> torch.Tensor:
    ids = torch.from_numpy(batch["ids"])
    return model(input_ids=ids, attention_mask=(ids > 0).long()).logits


@torch.no_grad()
def accuracy(data: texts.Encoded) -> float:
    """Return the share of the texts that the model classifies correctly."""
    model.eval()
    right = 0
    for batch in DataLoader(data, batch_size=256, collate_fn=texts.collate):
        right += int((logits_of(batch).argmax(1) == torch.from_numpy(batch["labels"])).sum())
    return right / len(data)


steps = options.epochs * -(-len(train) // 32)
optimizer = torch.optim.AdamW(model.parameters(), 5e-4, weight_decay=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-4, steps, pct_start=0.2)
best, weights = 0.0, {}
for epoch in range(options.epochs):
    model.train()
    for batch in DataLoader(train, batch_size=32, shuffle=True, collate_fn=texts.collate):
        loss = torch.nn.functional.cross_entropy(logits_of(batch), torch.from_numpy(batch["labels"]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    if (on_dev := accuracy(dev)) > best:
        best, weights = on_dev, copy.deepcopy(model.state_dict())
    print(f"epoch {epoch + 1} of {options.epochs}: {on_dev:.1%} right on dev", flush=True)
model.load_state_dict(weights)
model.save_pretrained(options.out)
PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=texts.LONGEST).save_pretrained(options.out)
on_test = accuracy(test)
print(f"teacher: {on_test:.1%} right, written to {options.out}")
settings.keep(options, model="teacher", dev=round(best, 4), test=round(on_test, 4))
