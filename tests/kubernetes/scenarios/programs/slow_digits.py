"""The teacher of examples/digits as if it were large: each call of it takes time, and no more of the machine.

edl serve --torch-factory slow_digits.py:teacher --option delay_s=0.1 --checkpoint teacher.pt ...
"""

import runpy
import time
from pathlib import Path

from torch import nn

NETS = Path(__file__).parents[4] / "examples/digits/nets.py"


def teacher(delay_s: float) -> nn.Module:
    """The same network with the same weights' names, which waits before it computes."""
    network = runpy.run_path(str(NETS))["teacher"]()
    assert isinstance(network, nn.Module)
    network.register_forward_pre_hook(lambda module, inputs: time.sleep(delay_s))
    return network
