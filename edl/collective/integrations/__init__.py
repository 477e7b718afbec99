"""EDL in other libraries' trainers and loops. Each module is loaded only when a script imports it.

`accelerate`, `lightning` and `transformers` restore a loop's state and position with `loop_position`, which saves
checkpoints at the step boundaries that they report. `paddle` has the state and the checkpointer for PaddlePaddle.
Scripts import the public names from `edl.collective.accelerate`, `.lightning`, `.transformers` and `.paddle`.
"""
