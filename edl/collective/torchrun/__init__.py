"""What torch finds of a rendezvous of EDL's that is gone."""
