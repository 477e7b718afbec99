"""Two students in PyTorch, a CNN and an LSTM. Both take ids int64 [rows, length], padded with 0."""

from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class CNN(nn.Module):
    """A convolution over three words, and the maximum of each feature over the text."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(words, 64, padding_idx=0)
        self.windows = nn.Conv1d(64, 128, 3, padding=1)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(128, 2)

    def forward(self, ids: Tensor) -> Tensor:
        features = self.windows(self.drop(self.vectors(ids)).transpose(1, 2)).relu()
        return self.head(self.drop(features.amax(2)))


class LSTM(nn.Module):
    """One LSTM layer, and the maximum of each feature over the text."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(words, 64, padding_idx=0)
        self.lstm = nn.LSTM(64, 64, batch_first=True)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(64, 2)

    def forward(self, ids: Tensor) -> Tensor:
        lengths = (ids > 0).sum(1).cpu()
        packed = pack_padded_sequence(self.drop(self.vectors(ids)), lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, padding_value=-1.0)
        return self.head(self.drop(states.amax(1)))


STUDENTS: dict[str, type[nn.Module]] = {"cnn": CNN, "lstm": LSTM}
