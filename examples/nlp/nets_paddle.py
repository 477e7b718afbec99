"""A student in PaddlePaddle, a bag of words. It takes ids int64 [rows, length], padded with 0."""

import paddle
from paddle import nn


class BagOfWords(nn.Layer):
    """The mean of the words' vectors, followed by a layer."""

    def __init__(self, words: int) -> None:
        super().__init__()
        normal = paddle.ParamAttr(initializer=nn.initializer.Normal())  # PyTorch's default; Paddle's is narrower
        self.vectors = nn.Embedding(words, 64, padding_idx=0, weight_attr=normal)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        lengths = (ids > 0).sum(axis=1, keepdim=True).astype("float32")
        return self.head(self.vectors(ids).sum(axis=1) / lengths)
