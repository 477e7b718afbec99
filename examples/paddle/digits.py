"""scikit-learn's handwritten digits as Paddle data sets: 1,197 images to train on, 600 to test with."""

import numpy as np
import paddle
from sklearn.datasets import load_digits


class Digits(paddle.io.Dataset):
    """Images float32 [64] and their labels."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        super().__init__()
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        return self.images[index], self.labels[index]


def load() -> tuple[Digits, Digits]:
    """Return the training and test data. The split is the same each time."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    test, train = order[:600], order[600:]
    return Digits(images[train], labels[train]), Digits(images[test], labels[test])


@paddle.no_grad()
def accuracy(model: paddle.nn.Layer, data: Digits) -> float:
    """Return the share of the images that the model classifies correctly."""
    model.eval()
    return float((model(paddle.to_tensor(data.images)).argmax(axis=1).numpy() == data.labels).mean())
