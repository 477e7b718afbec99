"""EDL in other libraries' trainers and loops; a module is loaded only when a script asks for it.

`accelerate`, `lightning` and `transformers` keep a loop's place and state by `loop_position`, which checkpoints at the
boundaries that they tell it of; `paddle` is the state and the checkpointer for PaddlePaddle. Scripts import the public
names from `edl.collective.accelerate`, `.lightning`, `.transformers` and `.paddle`.
"""
