"""Models of the sizes that people distil with, with random weights: what speed and memory depend on is there.

`edl serve --torch-factory tests/gpu/models.py:resnet50` builds the same weights as the check's own process: both draw
them on the CPU from one seed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FILE = Path(__file__).resolve()
SEED = 20


def be_deterministic() -> None:
    """Have this process compute the same bits each time, as a check compares them with another process's."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


class Bottleneck(nn.Module):
    """The block of ResNet-50 (He et al. 2015, table 1), with the stride in its 3x3 convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.path = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.short = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.path(images) + self.short(images))


def resnet50(
    width: int = 64, classes: int = 1000, channels_last: bool = True, deterministic: bool = False
) -> nn.Module:
    """Return a ResNet-50 for images [rows, 3, height, width] in float32; `width` 64 is the usual one."""
    if deterministic:
        be_deterministic()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ]
        inputs = width
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                layers.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
                inputs = 4 * (width << stage)
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    return model.to(memory_format=torch.channels_last)


def llama(folder: Path, *, hidden: int, layers: int, vocabulary: int, dtype: torch.dtype) -> Any:
    """Write a Llama of random weights into a folder, as `edl serve --hf` takes it, and return it in evaluation mode."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        max_position_embeddings=2048,
        initializer_range=0.05,  # logits spread out as a trained model's are
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    model.save_pretrained(folder)
    return model
