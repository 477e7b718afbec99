"""Plain torchrun in one of EDL's stores: `torchrun --rdzv-backend=edl`. `edl run` needs nothing of this."""
