"""Moves data from its source to the training loop: reads ahead, requests labels, and delivers in order.

A `LabelSession` runs a reader's epochs, one after the other. Its `ChunkLabeller` persists across epochs, and holds the
engines, shared memory and cache.
"""
