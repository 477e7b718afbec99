"""What torch still finds of EDL's former rendezvous backend."""
