"""Trains the teacher and the tokenizer, and writes a folder that both `edl serve --hf` and vLLM serve."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch
from corpus import END, PADDING, collate, split_files, train_tokenizer, windows
from nets import build, perplexity
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--batch", type=int, default=16, help="windows per step")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--vocabulary", type=int, default=1024)
parser.add_argument("--limit-files", type=int, default=0, help="number of files to use (default: all)")
parser.add_argument("--out", type=Path, default=Path("teacher"), help="(%(default)s)")
options = parser.parse_args()

torch.manual_seed(0)
learned, held_out = split_files(options.limit_files)
tokenizer = train_tokenizer(learned, options.vocabulary)
train, test = windows(learned, tokenizer), windows(held_out, tokenizer)
model = build("teacher", tokenizer)
print(f"{sum(map(len, train)):,} tokens of {len(learned)} files, {model.num_parameters():,} parameters", flush=True)
loader = DataLoader(train, batch_size=options.batch, shuffle=True, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), options.lr, weight_decay=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, options.epochs * len(loader) + 1, pct_start=0.1)
for epoch in range(options.epochs):
    model.train()
    for step, batch in enumerate(loader, 1):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"epoch {epoch + 1}, step {step} of {len(loader)}: loss {loss.item():.3f}", flush=True)
model.save_pretrained(options.out)
PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PADDING, eos_token=END).save_pretrained(options.out)
facts = {
    "perplexity": perplexity(model, test),
    "parameters": model.num_parameters(),
    "tokens": sum(map(len, train)),
    "held_out_tokens": sum(map(len, test)),
    "files": len(learned),
    "held_out_files": len(held_out),
    "python": platform.python_version(),
}
(options.out / "facts.json").write_text(json.dumps(facts))
print(f"perplexity {facts['perplexity']:.2f} on {len(held_out)} held-out files, written to {options.out}")
