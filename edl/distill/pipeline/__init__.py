"""Takes the user's data from its source to the training loop: read ahead, labelled, and delivered in order.

- `session` has a reader's epochs, one after the other, and its `chunk_labeller`;
- `chunk_labeller` outlives epochs: engines, shared memory and the cache behind a single front;
- `epoch` is a pass over the data: a thread feeds the teachers ahead of the training loop, within the bounds of
  `open_chunks`;
- `combine` puts answers together for an item, `epoch_iterator` is what the training loop iterates;
- `cache_lookup` asks the soft-label cache before the teachers, `cache_queue` puts their answers into it;
- `answer_size` estimates what answers will take in memory.

What does not belong here: which teacher answers, and the formats of the cache.
"""
