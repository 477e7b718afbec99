"""Errors of GPUs in tracebacks and in the kernel's log, and whose fault they are.

CUDA's words are those of `cudaGetErrorString`; its reference says of each error what causes it
(https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html). The driver writes an Xid into the kernel's
log (https://docs.nvidia.com/deploy/xid-errors/). "device-side assert triggered" and "out of memory" are in no list
here: they are errors of the script.
"""

from __future__ import annotations

import contextlib
import os
import re
from enum import Enum
from pathlib import Path
from typing import Final

__all__ = ["GpuFault", "KernelLog", "find_gpu_fault", "is_nccl_misuse"]

# Lines that begin in the first column are exceptions; a traceback's lines of source are indented, and say nothing.
_SAID_BY: Final = r"(?:CUDA|HIP)(?: driver)? (?:error|failure)(?: ?\(?\d+\)?)?[:,]?[ ']+"
_HARDWARE: Final = re.compile(
    rf"^(?=\S).*?(?:{_SAID_BY}(?:uncorrectable ECC error|uncorrectable NVLink error"
    r"|Invalid access of peer GPU memory over nvlink or a hardware error)|\bGPU is lost\b|fallen off the bus).*$",
    re.IGNORECASE | re.MULTILINE,
)
_UNCLEAR: Final = re.compile(
    rf"^(?=\S).*?(?:{_SAID_BY}(?:unspecified launch failure|an illegal memory access|misaligned address"
    r"|an illegal instruction|invalid program counter|hardware stack error"
    r"|CUBLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR))|CUDNN_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR)).*$",
    re.IGNORECASE | re.MULTILINE,
)
_MISSING: Final = re.compile(
    rf"^(?=\S).*?(?:{_SAID_BY}(?:no CUDA-capable device|invalid device ordinal|CUDA-capable device\(s\) is/are busy"
    r"|initialization error|system not yet initialized|unknown error)|No CUDA GPUs are available"
    r"|CUDA driver initialization failed|CUDA unknown error).*$",
    re.IGNORECASE | re.MULTILINE,
)
_MISUSE: Final = re.compile(r"\bnccl(?:InvalidUsage|InvalidArgument)\b")

_XID: Final = re.compile(rb"NVRM: Xid \((?P<device>[^)]*)\): (?P<number>\d+)")
_HARDWARE_XIDS: Final = {
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    64: "row remapping failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    95: "uncontained ECC error",
    119: "the GPU's system processor does not answer",
    120: "error of the GPU's system processor",
    140: "unrecovered ECC error",
}
"""Xids for which NVIDIA's catalogue asks to reset the GPU, reboot or replace it. 13, 31 and 43 are applications' errors
as a rule, 63 and 94 end with the process."""
_RECORD_NBYTES: Final = 8192  # the kernel refuses to read a record into less (CONSOLE_EXT_LOG_MAX)


class GpuFault(Enum):
    """The cause that an error of a GPU names."""

    HARDWARE = "hardware"
    """The node is at fault: its GPU has to be reset or replaced."""
    UNCLEAR = "unclear"
    """The kernel that ran has an error in it, or the GPU is broken: CUDA cannot tell."""
    MISSING = "missing"
    """There is no such GPU: the script asked for too many, or the GPU was there and is no more."""


def find_gpu_fault(text: str) -> tuple[GpuFault, str] | None:
    """Find an error of a GPU in a traceback.

    Args:
        text: the traceback.

    Returns:
        Its cause as far as known, and the line that says it; None if there is none.
    """
    for fault, pattern in (
        (GpuFault.HARDWARE, _HARDWARE),
        (GpuFault.UNCLEAR, _UNCLEAR),
        (GpuFault.MISSING, _MISSING),
    ):
        found = pattern.search(text)
        if found is not None:
            return fault, found[0].strip()
    return None


def is_nccl_misuse(text: str) -> bool:
    """Return whether NCCL refused what the script asked it for, such as a GPU for two ranks."""
    return _MISUSE.search(text) is not None


class KernelLog:
    """Reads the Xids of failed hardware that the kernel logs from now on.

    A process that NCCL's watchdog ends leaves no traceback, and only this tells why. Without the right to read the log,
    as in most containers, nothing is found.

    Args:
        path: of the log; each read returns whole records.
    """

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        self._file: int | None = None
        self._found: list[str] = []
        with contextlib.suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, os.SEEK_END)

    def read_xids(self) -> list[str]:
        """Return all Xids of failed hardware since the last `clear_xids`, in words."""
        while self._file is not None:
            try:
                record = os.read(self._file, _RECORD_NBYTES)
            except BrokenPipeError:
                continue  # records were overwritten before they were read; the next read has the oldest one left
            except OSError:
                break
            if not record:
                break
            for found in _XID.finditer(record):
                number = int(found["number"])
                if number in _HARDWARE_XIDS:
                    device = found["device"].decode(errors="replace")
                    self._found.append(f"Xid {number} of {device} in the kernel's log: {_HARDWARE_XIDS[number]}")
        return list(self._found)

    def clear_xids(self) -> None:
        """Leave out what was logged until now."""
        self.read_xids()
        self._found.clear()

    def close(self) -> None:
        """Close the log."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
