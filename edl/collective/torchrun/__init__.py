"""Keeps the part of EDL's former rendezvous backend that torch must still find."""
