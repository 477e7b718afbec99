"""scikit-learn's handwritten digits as PyTorch data sets: 1,197 images to train on, 600 to test with."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return training and test images, float32 [1, 8, 8], with their labels. The split is the same each time."""
    pixels, labels = load_digits(return_X_y=True)
    images, targets = torch.tensor(pixels / 16).float().view(-1, 1, 8, 8), torch.tensor(labels)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:600], order[600:]
    return TensorDataset(images[train], targets[train]), TensorDataset(images[test], targets[test])


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Return the share of the images that the model classifies correctly."""
    images, labels = data.tensors
    return float((model.eval()(images).argmax(dim=1) == labels).float().mean())
