"""Names and options from earlier versions. Using one of them raises an error that says what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_PLAIN_LOOP: Final = (
    "call torch.distributed.init_process_group() and Checkpointer.restore(), and continue with the step after "
    "the one that it returns; workers are forked again after a loss (docs/recovery.md)"
)
REMEDIES: Final[Mapping[str, str]] = {
    "Place": _PLAIN_LOOP,
    "run_in_process": _PLAIN_LOOP,
    "stay": _PLAIN_LOOP,
    "overlap": "remove it: a save returns when the copy is complete, as it does on GPUs",
    "--regroup-timeout": "remove it: every restart starts new processes",
    "--rdzv-backend=edl": "start the script with `edl run`, which takes torchrun's options, or use --rdzv-backend=c10d",
}


def describe_removal(name: str) -> str:
    return f"{name} was removed: {REMEDIES[name]}"
