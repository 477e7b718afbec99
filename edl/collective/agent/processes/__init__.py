"""The processes of a node's workers: how they are forked after torch is imported, their output, stacks and exit."""
