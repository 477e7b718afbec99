"""Trains a student on the files alone (hard), on the teachers' labels for them, or also on text that it writes."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from corpus import collate, split_files, windows
from nets import build, divergence_on_own_text, generate, perplexity, written
from tokenizers import Tokenizer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedModel

from edl.distill import Options, ReaderStats, Scorer, on_policy
from edl.distill.compress import TopK
from edl.distill.losses import token_loss
from edl.distill.torch import distill

Item = TypeVar("Item")
Losses = Iterator[tuple[torch.Tensor, Callable[[], ReaderStats] | None]]
"""The loss of each step, and a function that returns the reader's statistics, if there is one."""
PROMPT = 16
"""Tokens from a file that the student continues."""
WAIT = Options(teacher_timeout_s=300)  # while no teacher is live


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    tokenizer = Tokenizer.from_file(f"{options.teacher}/tokenizer.json")
    learned, held_out = split_files(options.limit_files)
    files = random.Random(options.seed).sample(learned, min(options.files, len(learned)))
    train, test = windows(files, tokenizer), windows(held_out, tokenizer)
    model = build("student", tokenizer)
    order = torch.Generator().manual_seed(options.seed)
    loader = DataLoader(train, batch_size=options.batch, shuffle=True, collate_fn=collate, generator=order)

    optimizer = torch.optim.AdamW(model.parameters(), options.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, options.steps + 1, pct_start=0.1)
    journal = Journal(options.log, options.steps)
    for step, (loss, stats) in enumerate(losses(options, model, loader), 1):
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 10 == 0 or step == options.steps:
            journal.write(step, loss.item(), stats)

    torch.manual_seed(options.seed)
    prompts = torch.stack([window[:PROMPT] for window in test if len(window) >= PROMPT])
    prompts = prompts[:: -(-len(prompts) // 128)]  # samples of all files
    teacher = AutoModelForCausalLM.from_pretrained(options.teacher)
    facts = {
        "arm": options.arm,
        "seed": options.seed,
        "perplexity": perplexity(model, test),
        "own_text": divergence_on_own_text(model, teacher, prompts, options.completion),
        "tokens": sum(map(len, train)),
        "parameters": model.num_parameters(),
        "cpu_s": time.process_time(),
    }
    print(f"{options.arm}: perplexity {facts['perplexity']:.2f}, {facts['own_text']:.3f} nats from the teacher")
    if options.out:
        options.out.write_text(json.dumps(facts))


def losses(options: argparse.Namespace, model: PreTrainedModel, loader: DataLoader) -> Losses:
    """Yield a loss for each step, computed on demand."""
    own = round(options.steps * options.own_share) if options.arm == "on-policy" else 0
    if options.arm == "hard":
        yield from hard(model, itertools.islice(endless(loader), options.steps))
    else:
        yield from off_policy(options, model, loader, options.steps - own)
    if own:
        yield from of_own_text(options, model, loader, own)


def hard(model: PreTrainedModel, batches: Iterable[dict]) -> Losses:
    for batch in batches:
        yield model.train()(**batch).loss, None


def off_policy(options: argparse.Namespace, model: PreTrainedModel, loader: DataLoader, steps: int) -> Losses:
    """Yield losses on labelled files: forward KL over the likeliest tokens and the rest, plus cross-entropy."""
    labelled = distill(
        loader,
        options.teachers,
        discovery=options.store,
        inputs={"ids": "input_ids"},
        outputs="logprobs",
        tokens="attention_mask",
        tokenizer=options.teacher,
        top_k=options.top_k,
        options=WAIT,
    )
    with labelled:
        for batch, labels in itertools.islice(endless(labelled), steps):
            logits = model.train()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            soft = token_loss(logits, labels, mask=written(batch, 1))
            true = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
            yield torch.lerp(soft, true, options.hard_weight), labelled.stats


def of_own_text(options: argparse.Namespace, model: PreTrainedModel, loader: DataLoader, steps: int) -> Losses:
    """Yield losses on text that the student writes and the teachers score."""
    prompts = itertools.islice(prompts_of(endless(loader)), steps)
    scorer = Scorer(
        options.teachers,
        discovery=options.store,
        tokenizer=options.teacher,
        top_k=options.top_k,
        options=WAIT,
    )
    with scorer:
        for _, sequences, labels in on_policy(
            prompts, lambda prompts: generate(model, prompts, options.completion), scorer
        ):
            batch = collate(sequences)
            mask = batch["attention_mask"].bool()
            logits = model.train()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            of_tokens = TopK.concatenate(labels)  # one row per token, like logits[mask]
            learned = written(batch, PROMPT)[mask]
            yield token_loss(logits[mask], of_tokens, mask=learned, beta=options.beta), scorer.stats


def prompts_of(batches: Iterable[dict]) -> Iterator[torch.Tensor]:
    """Yield the beginnings of windows, int64 [rows, PROMPT]. Short windows are skipped."""
    for batch in batches:
        long_enough = batch["attention_mask"].sum(1) >= PROMPT
        if long_enough.any():
            yield batch["input_ids"][long_enough, :PROMPT]


def endless(loader: Iterable[Item]) -> Iterator[Item]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


class Journal:
    """Writes a line of JSON every ten steps."""

    def __init__(self, path: Path | None, steps: int) -> None:
        self.path, self.steps = path, steps

    def write(self, step: int, loss: float, stats: Callable[[], ReaderStats] | None) -> None:
        facts: dict[str, Any] = {"step": step, "of": self.steps, "loss": round(loss, 4), "time": time.time()}
        if stats:
            now = stats()
            facts |= {"teachers": now.teachers_live, "tokens": now.rows_delivered, "resent": now.rows_resent}
            facts |= {"hedged": now.rows_hedged, "waited_s": round(now.wait_s, 2)}
            facts["answered"] = {teacher.endpoint: teacher.rows for teacher in now.teachers.values()}
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps(facts) + "\n")
        if step % 50 == 0:
            taught = f", {now.line()}" if stats else ""
            print(f"step {step} of {self.steps}: loss {loss:.3f}{taught}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arm", choices=("hard", "off-policy", "on-policy"), default="hard", help="(%(default)s)")
    parser.add_argument("--teachers", help="the teachers' service, or host:port; not with --arm hard")
    parser.add_argument("--store", "--discovery", help="URL of the store (default: EDL_DISCOVERY, or a local file)")
    parser.add_argument("--teacher", default="teacher", help="folder that train_teacher.py wrote (%(default)s)")
    parser.add_argument("--files", type=int, default=8, help="number of files to train on (%(default)s)")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch", type=int, default=8, help="windows per step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--top-k", type=int, default=16)
    parser.add_argument("--hard-weight", type=float, default=0.3, help="weight of the true tokens (%(default)s)")
    parser.add_argument("--own-share", type=float, default=0.3, help="share of steps on its own text (%(default)s)")
    parser.add_argument("--beta", type=float, default=1.0, help="beta of the loss on its own text (%(default)s)")
    parser.add_argument("--completion", type=int, default=48, help="tokens that it writes per prompt (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-files", type=int, default=0, help="the teacher's --limit-files")
    parser.add_argument("--log", type=Path, help="append progress to this file")
    parser.add_argument("--out", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if (options.arm == "hard") == bool(options.teachers):
        parser.error("--teachers goes with --arm off-policy and on-policy")
    return options


if __name__ == "__main__":
    main()
