"""Trains the teacher on the labels and writes teacher.pt."""

import argparse

import digits
import nets
import torch
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--out", default="teacher.pt")
options = parser.parse_args()

torch.manual_seed(0)
train, test = digits.load()
model = nets.teacher()
optimizer = torch.optim.Adam(model.parameters(), 2e-3)
for epoch in range(options.epochs):
    model.train()
    for images, labels in DataLoader(train, batch_size=64, shuffle=True):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1} of {options.epochs}: {digits.accuracy(model, test):.1%} right", flush=True)
torch.save(model.state_dict(), options.out)
print(f"teacher: {digits.accuracy(model, test):.1%} right, weights in {options.out}")
