"""What the package's program imports relatively."""

ANSWER = 42
