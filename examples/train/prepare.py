"""Writes train.parquet and test.parquet from scikit-learn's handwritten digits, and trains the teacher.

The student's table has 200 of the 1,197 training images. The teacher is trained on all of them, like a large model that
has seen more than the labels of one task.
"""

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from model import teacher
from sklearn.datasets import load_digits

TEST, LABELLED = 600, 200


def write(path: str, images: np.ndarray, digits: np.ndarray) -> None:
    """Write a table with the columns image, 8 lists of 8 numbers each, and label."""
    kind = pyarrow.list_(pyarrow.list_(pyarrow.float32()))
    table = pyarrow.table({"image": pyarrow.array(images.tolist(), kind), "label": digits})
    pyarrow.parquet.write_table(table, path)
    print(f"{path}: {len(digits):,} rows")


pixels, digits = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(digits))
images, digits = (pixels / 16).astype(np.float32).reshape(-1, 8, 8)[order], digits[order]
write("test.parquet", images[:TEST], digits[:TEST])
write("train.parquet", images[-LABELLED:], digits[-LABELLED:])

torch.manual_seed(0)
network, images, digits = teacher(), torch.from_numpy(images), torch.from_numpy(digits)
adam = torch.optim.Adam(network.parameters())
for _ in range(20):
    for rows in (TEST + torch.randperm(len(digits) - TEST)).split(64):
        adam.zero_grad()
        torch.nn.functional.cross_entropy(network(images[rows]), digits[rows]).backward()
        adam.step()
torch.save(network.state_dict(), "teacher.pt")
right = network(images[:TEST]).argmax(1) == digits[:TEST]
print(f"teacher.pt: {right.float().mean():.1%} right")
