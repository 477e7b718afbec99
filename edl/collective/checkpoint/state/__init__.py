"""Defines the state that is saved: the fields of a `State`, and the tensors and plain values of a snapshot."""
