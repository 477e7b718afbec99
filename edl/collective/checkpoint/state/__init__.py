"""What is saved: the fields of a `State`, and their tensors and plain values in a snapshot."""
