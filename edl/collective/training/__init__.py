"""Elastic training steps: which samples a step trains and how it updates the parameters, for any number of ranks.

`sampler` decides which rank trains which samples, and `trainer` updates the parameters, one `step` at a time.
`learning_rate` adapts the learning rate when the batch changes, and `tuner` chooses the batch. Rank membership and
checkpoints belong elsewhere in `edl.collective`.
"""

from edl.collective.training.learning_rate import AdaScale, Linear, SampleSchedule, SquareRoot
from edl.collective.training.tuner import AutoBatch

__all__ = ["AdaScale", "AutoBatch", "Linear", "SampleSchedule", "SquareRoot"]
