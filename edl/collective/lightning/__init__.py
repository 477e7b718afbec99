"""Lightning's `Trainer` under `edl run`: `ElasticLightningCallback`.

Lightning's own checkpoints go on with an epoch's first batch, lack what was logged in it, and call hooks of its begin
and end by rules of their own. So its loops are not restarted: they are given the position, and those of their methods
that matter are wrapped. A state is saved before a batch is read, so that random numbers which the dataset draws in this
process come back as well. Inside:

- `callback`: the callback, and what it refuses;
- `progress`: where the loops are; `logged`: what was logged in the epoch; `hooks`: what goes into checkpoints by hooks.

What does not belong here: what other libraries' loops need as well (`edl.collective.loop_position`).
"""

from edl.collective.lightning.callback import ElasticLightningCallback

__all__ = ["ElasticLightningCallback"]
