"""Takes the user's data from its source to the training loop: read ahead, labelled, and delivered in order.

- `request` says what is asked for, and of whom;
- `session` has a reader's epochs, one after the other, and its `chunk_labeller`;
- `chunk_labeller` outlives epochs: engines, shared memory and the cache in one place; `teacher_limits` says what the
  teachers take, once there are some;
- `epoch` is a pass over the data: a thread feeds the teachers ahead of the training loop, within bounds;
- `answers` puts answers together for an item, and estimates what answers will take in memory;
- `label_cache` asks the soft-label cache before the teachers, and puts their answers into it.

What does not belong here: which teacher answers, and the formats of the cache.
"""
