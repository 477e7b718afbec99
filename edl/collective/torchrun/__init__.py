"""Plain torchrun in a store of EDL's: `torchrun --rdzv-backend=edl`. `edl run` needs nothing of this."""
