"""Trains the teacher on the labels and writes its weights. This is ordinary PyTorch, without EDL."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from data import accuracy_of, class_count, open_images
from nets import build, normalize
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", default="digits", help="a folder with train/CLASS/*.jpg and test/CLASS/*.jpg")
parser.add_argument(
    "--crop", type=int, default=0, help="crop images of any size to this many pixels; needs torchvision"
)
parser.add_argument("--arch", default="deep", help="deep, small, torchvision:NAME or timm:NAME (%(default)s)")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--lr", type=float, default=0.2)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", default="teacher.pt", help="file for the weights; a .json beside it has the accuracy")
options = parser.parse_args()

torch.manual_seed(options.seed)
train, test = (open_images(options.data, part, options.crop) for part in ("train", "test"))
model = build(options.arch, class_count(train))
loader = DataLoader(train, batch_size=options.batch, shuffle=True, drop_last=True)
optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, options.epochs * len(loader), pct_start=0.2)
for epoch in range(options.epochs):
    for images, labels in loader:
        loss = cross_entropy(model(normalize(images)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    accuracy = accuracy_of(model, DataLoader(test, batch_size=500))
    print(f"epoch {epoch + 1} of {options.epochs}: {accuracy:.1%} right", flush=True)
torch.save(model.state_dict(), options.out)
parameters = sum(parameter.numel() for parameter in model.parameters())
facts = {"arch": options.arch, "classes": class_count(train), "size": train[0][0].shape[-1]}
facts |= {"parameters": parameters, "images": len(train), "accuracy": accuracy}
Path(options.out).with_suffix(".json").write_text(json.dumps(facts) + "\n")
print(f"teacher: {accuracy:.1%} right, {parameters:,} parameters, weights in {options.out}")
