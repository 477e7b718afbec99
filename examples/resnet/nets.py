"""The networks: two residual networks for small images, and all those in torchvision and timm, by name."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

OWN = {"small": (16, 1), "deep": (32, 2)}  # channels of the first stage, blocks per stage
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's: `edl serve --normalize imagenet`

_FITS = f"for torch {torch.__version__}, from where that was installed (README.md, ImageNet on GPUs)"


class Block(nn.Module):
    """Two convolutions and a skip connection around them (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        plain = inputs == outputs and stride == 1
        around = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)]
        self.around = nn.Identity() if plain else nn.Sequential(*around)

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.path(images) + self.around(images))


def resnet(width: int, depth: int, classes: int) -> nn.Module:
    """Return a network from images, float32 [rows, 3, height, width], to logits [rows, classes].

    Its three stages work at 1/2, 1/4 and 1/8 of the size.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for stage in range(3):
        outputs = width * 2**stage
        for block in range(depth):
            first = block == 0 and stage > 0
            layers.append(Block(outputs // 2 if first else outputs, outputs, 2 if first else 1))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))


def build(arch: str = "small", classes: int | str = 10, pretrained: str = "no") -> nn.Module:
    """Build a network from images float32 [rows, 3, height, width] to logits [rows, classes].

    `edl serve --torch-factory nets.py:build --option arch=...` also calls this function, with strings as arguments.

    Args:
        arch: "small" (8 layers), "deep" (14 layers), or a library's network: "torchvision:resnet50", "timm:resnet50d".
        classes: Number of classes.
        pretrained: "yes" to download the library's own weights.

    Raises:
        ImportError: The library is not installed, or does not match PyTorch.
        ValueError: There is no such network.
    """
    library, _, name = arch.rpartition(":")
    weights = pretrained == "yes"
    if library == "torchvision":
        models = load_library("torchvision.models", f"arch={arch}")
        return models.get_model(name, weights="DEFAULT" if weights else None, num_classes=int(classes))
    if library == "timm":
        return load_library("timm", f"arch={arch}").create_model(name, pretrained=weights, num_classes=int(classes))
    if library or name not in OWN:
        raise ValueError(f"arch={arch}: must be one of {', '.join(OWN)}, torchvision:NAME or timm:NAME")
    return resnet(*OWN[name], int(classes)).to(memory_format=torch.channels_last)


def load_library(module: str, wanted_by: str) -> Any:
    """Import a module of torchvision or timm, which are needed only if you name one of their networks.

    Args:
        module: Name of the module.
        wanted_by: The setting that needs the module, for the error message.

    Raises:
        ImportError: The module is not installed, or does not match PyTorch. The message says what to install.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name not in ("torchvision", "timm"):
            raise
        raise ImportError(f"{wanted_by} needs {package}: pip install {package}, with a torchvision {_FITS}") from exc
    except (ImportError, OSError, RuntimeError) as exc:  # torchvision's operators are compiled for another torch
        raise ImportError(f"{wanted_by}: {package} cannot be imported ({exc}): take a torchvision {_FITS}") from exc


def normalize(images: Tensor) -> Tensor:
    """Return uint8 images [rows, 3, height, width] as normalized floats, like `edl serve --normalize imagenet`."""
    mean, std = (torch.tensor(values, device=images.device).view(3, 1, 1) for values in (MEAN, STD))
    return ((images / 255 - mean) / std).contiguous(memory_format=torch.channels_last)
