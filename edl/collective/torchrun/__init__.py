"""What remains of EDL's former rendezvous backend for torch to find."""
