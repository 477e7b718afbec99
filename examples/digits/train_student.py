"""Trains the student on the teachers' predictions. You can start, stop or kill teachers while it trains."""

import argparse

import digits
import nets
import torch
from torch.utils.data import DataLoader

from edl.distill.losses import DistillLoss
from edl.distill.torch import distill

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--teachers", default="handwriting", help="a service, or the teachers' host:port (%(default)s)")
parser.add_argument("--store", "--discovery", help="URL of the store (default: EDL_DISCOVERY, or a local file)")
parser.add_argument("--epochs", type=int, default=30)
options = parser.parse_args()

torch.manual_seed(0)
train, test = digits.load()
model = nets.student()
optimizer = torch.optim.Adam(model.parameters(), 5e-3)
loss_of = DistillLoss(temperature=4.0, alpha=0.9)

loader = DataLoader(train, batch_size=64, shuffle=True)
with distill(loader, options.teachers, inputs=["image", None], outputs="logits", discovery=options.store) as labelled:
    for epoch in range(options.epochs):
        model.train()
        for (images, labels), logits in labelled:
            loss = loss_of(model(images), logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}, {labelled.stats().line()}")
print(f"student: {digits.accuracy(model, test):.1%} right")
