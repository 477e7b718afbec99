"""Trains the teacher on the labels and writes it as an inference model: teacher.json, teacher.pdiparams."""

import argparse

import digits
import nets
import paddle

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--out", default="teacher")
options = parser.parse_args()

paddle.seed(0)
train, test = digits.load()
model = nets.teacher()
optimizer = paddle.optimizer.Adam(2e-3, parameters=model.parameters())
for _ in range(options.epochs):
    model.train()
    for images, labels in paddle.io.DataLoader(train, batch_size=64, shuffle=True):
        loss = paddle.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
print(f"teacher: {digits.accuracy(model, test):.1%} right, written to {options.out}")
paddle.jit.save(model, options.out, input_spec=[paddle.static.InputSpec([None, 64], "float32", "image")])
