"""The processes of a node's workers: how they are forked once torch is imported, their output, stacks and exits."""
