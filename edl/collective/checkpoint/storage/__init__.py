"""Checkpoints in storage, in the format of `torch.distributed.checkpoint`: writer, reader, manifest, folder."""
