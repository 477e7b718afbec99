"""Numpy arrays as tensors on a device, and uint8 images as the floats that a model was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from edl.errors import SettingsError
from edl_serving.backends.backend import Array, TensorSpec

__all__ = ["Normalization", "to_tensor"]

# The channel means and standard deviations of ImageNet that torchvision's models were trained with.
_IMAGENET = "0.485,0.456,0.406/0.229,0.224,0.225"


def to_tensor(array: Array, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an array as a tensor, which shares memory where it can.

    A read-only or unaligned array is copied: a model may work in place, and torch cannot protect memory.

    Args:
        array: of any shape.
        device: of the tensor.
        dtype: of the tensor; None for the array's.
    """
    if not (array.flags.writeable and array.flags.aligned):
        # On the CPU in one go. Towards a GPU the type is changed there: fewer bytes travel.
        tensor = torch.tensor(array, dtype=dtype if device.type == "cpu" else None)
    else:
        tensor = torch.from_numpy(array)
    return tensor.to(device).to(dtype or tensor.dtype)


@dataclass(frozen=True)
class Normalization:
    """`(pixel / 255 - mean) / deviation` for the channels of uint8 images `[rows, channels, ...]`.

    Students thus send a quarter of the bytes that floats would take.

    Attributes:
        scale: factor of a pixel, `[channels, 1, ...]`.
        shift: what is added, of the same shape.
    """

    scale: torch.Tensor
    shift: torch.Tensor

    @classmethod
    def parse(cls, text: str, inputs: Sequence[TensorSpec], device: torch.device) -> Normalization:
        """Parse "imagenet", or "m,m,m/s,s,s"; a single value stands for all channels.

        Args:
            text: means and deviations.
            inputs: of the model.
            device: of the tensors.

        Raises:
            SettingsError: the text is something else, or does not fit the inputs.
        """
        means, slash, deviations = (_IMAGENET if text == "imagenet" else text).partition("/")
        try:
            mean = torch.tensor([float(value) for value in means.split(",")], dtype=torch.float64)
            deviation = torch.tensor([float(value) for value in deviations.split(",")], dtype=torch.float64)
        except ValueError:
            slash = ""
        if not slash or not (deviation > 0).all() or not mean.isfinite().all() or not deviation.isfinite().all():
            raise SettingsError(
                f"--normalize {text!r}: expected imagenet, or means/deviations as in 0.5,0.5,0.5/0.2,0.2,0.2"
            )
        channels = max(len(mean), len(deviation))
        images = [spec for spec in inputs if spec.datatype == "UINT8"]
        if not images:
            raise SettingsError(f"--normalize {text!r}: no input is UINT8")
        for spec in images:
            if (
                not spec.shape
                or (channels > 1 and spec.shape[0] != channels)
                or {len(mean), len(deviation)} - {1, channels}
            ):
                raise SettingsError(
                    f"--normalize {text!r}: {channels} channels, and input {spec.name!r} is {list(spec.shape)}"
                )
        shape = (-1, *[1] * (len(images[0].shape) - 1))
        return cls(
            scale=(1 / (255 * deviation)).float().reshape(shape).to(device),
            shift=(-mean / deviation).float().reshape(shape).to(device),
        )

    def apply(self, array: Array) -> torch.Tensor:
        """Return normalized floats on the device.

        Args:
            array: uint8 `[rows, channels, ...]`.
        """
        return to_tensor(array, self.scale.device, torch.float32).mul_(self.scale).add_(self.shift)
