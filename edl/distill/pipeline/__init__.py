"""Moves the user's data from its source to the training loop: reads ahead, requests labels, and delivers in order.

- `request` describes which labels to get and which teachers to ask;
- `session` runs a reader's epochs, one after the other, and owns its `chunk_labeller`;
- `chunk_labeller` persists across epochs: it holds engines, shared memory and the cache, and knows teachers' limits;
- `epoch` is one pass over the data, in which a thread feeds the teachers ahead of the training loop, within bounds;
- `answers` assembles the answers for an item, and estimates their size;
- `label_cache` looks labels up in the soft-label cache before teachers are asked, and stores their answers.
"""
