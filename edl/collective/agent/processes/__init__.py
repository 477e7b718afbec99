"""The processes of a node's workers: forked from one that has imported torch, their output, their stacks, their end."""
